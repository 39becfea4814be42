"""Activation functions that a model's configuration names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.architectures.config_source import modeling_source
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import given_fields, part_type

KNOWN = frozenset(
    (
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu"),
        *("relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    )
)
"""Names in transformers' table, which it imports torch to build. A few families take others besides."""
_NAMES_ONE = re.compile(r"(^|_)(act|activation)(_fn|_function)?$|^hidden_mamba_act$")
"""Fields that name an activation function."""


def check_activations(model: ModelConfig) -> None:
    """Raise for an unknown activation function that the family's source takes from transformers' table alone.

    It imports neither torch nor transformers. For other families the built model refuses a wrong name.

    Raises:
        ConfigError: the field, with the nearest known name.
    """
    fields = given_fields(model)
    for key, name, model_type in _unknown(fields, str(fields.get("model_type", model.type)), "model.config"):
        field, source = key.rpartition(".")[2], "\n".join(modeling_source(model_type) or ())
        takes_others = re.search(rf"\.{field}\s*(==|!=|in\b|not in\b)", source)
        if re.search(rf"ACT2FN\[\s*(self\.)?config\.{field}\s*\]", source) and not takes_others:
            raise refused_activation(key, name)


def unknown_activations(model: ModelConfig) -> list[tuple[str, str]]:
    """Key and value of each field, parts of the model included, that names none of :data:`KNOWN`."""
    fields = given_fields(model)
    unknown = _unknown(fields, str(fields.get("model_type", model.type)), "model.config")
    return [(key, name) for key, name, _ in unknown]


def refused_activation(key: str, name: str) -> ConfigError:
    """Error of a field that names no activation function of transformers."""
    return ConfigError(key, name, choose_from(name, sorted(KNOWN)), "transformers has no such activation function")


def _unknown(fields: Mapping[str, Any], model_type: str, within: str) -> Iterator[tuple[str, str, str]]:
    """Key, value and model type of each field that names no known activation function."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and name.endswith("_config"):
            yield from _unknown(value, part_type(model_type, name, value), f"{within}.{name}")
        elif isinstance(value, str) and _NAMES_ONE.search(name) and value not in KNOWN:
            yield f"{within}.{name}", value, model_type
