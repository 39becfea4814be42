"""``data=synthetic``: random tokens in documents of log-normal length (:mod:`mgpu_pipe.data.text.generated`)."""

from __future__ import annotations

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.errors import ConfigError, ConfigErrors


def check_shape(model: ModelConfig, data: DataConfig) -> None:
    shape = data.synthetic
    least_values = (
        ("num_documents", shape.num_documents, 1),
        ("mean_length", shape.mean_length, 2),
        ("sigma", shape.sigma, 0),
    )
    errors = [
        ConfigError(f"data.synthetic.{name}", value, f"use at least {least}")
        for name, value, least in least_values
        if value < least
    ]
    if errors:
        raise ConfigErrors(errors)


SOURCE = DataSource(name="synthetic", documents="tokens", reads=(*TEXT_KEYS, "synthetic"), check=check_shape)
