"""Activations and ranges of model fields that transformers' classes take and the first step would refuse."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.architectures.config_source import ConfigClass, config_class, modeling_source
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models.field_sizes import EXPERTS
from mgpu_pipe.models.field_types import PARAMETERS, PARTIAL
from mgpu_pipe.models.fields import given_fields, part_type, resolved_fields

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


DROPS = re.compile(r"(dropout|pdrop|dropout_rate|dropout_prob|drop_rate)$")
"""Fields that hold the probability to drop a value."""
SPREADS = re.compile(r"(^|_)(eps|epsilon|std|initializer_range|initializer_factor)$")
"""Fields that hold the width of a distribution, or what is added to one."""
PADDING = "pad_token_id"
HEAD, HEADS, WIDTH = "head_dim", "num_attention_heads", "hidden_size"
TURNED = "qk_rope_head_dim"
"""Field that holds the turned part of a head."""
TURN_LESS = frozenset(
    [
        *(
            "bamba",
            "cohere_compass_text",
            "deepseek_v4",
            "gemma4_text",
            "gemma4_unified_text",
            "glm",
            "glm4",
            "glm4_moe",
        ),
        *("gpt_neox", "laguna", "mimo_v2_flash", "nemotron", "persimmon", "phi", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "recurrent_gemma", "stablelm", "zaya"),
    ]
)
"""Model types whose class turns a part of a head, or none, where no field says so."""
SMALLEST_HEAD = 4
"""Up to this size transformers turns odd heads too."""
CHOSEN = "num_experts_per_tok"
"""Field that holds the number of experts that see a token."""


def check_ranges(model: ModelConfig) -> None:
    """Raise ConfigErrors for values of ``model.config`` out of range, but not for a folder's fields alone."""
    fields = resolved_fields(model)
    family = str(fields["model_type"])
    errors = [*_out_of_range(model.config, fields, family, "model.config"), *_odd_heads(model.config, fields)]
    experts = next((fields[name] for name in EXPERTS if isinstance(fields.get(name), int)), 0)
    chosen = fields.get(CHOSEN)
    if CHOSEN in model.config and isinstance(chosen, int) and 0 < experts < chosen:
        fix = f"use at most {experts}"
        errors.append(ConfigError(f"model.config.{CHOSEN}", chosen, fix, f"a layer has {experts} experts"))
    if errors:
        raise ConfigErrors(errors)


def _out_of_range(
    overrides: Mapping[str, Any], fields: Mapping[str, Any], model_type: str, within: str
) -> Iterator[ConfigError]:
    """Errors of probabilities, of spreads and of padding outside the vocabulary, in a model and its parts."""
    known = config_class(model_type) or ConfigClass()
    for name, value in overrides.items():
        key, is_number = f"{within}.{name}", isinstance(value, int | float)
        smallest, largest = known.bounds.get(known.attribute_map.get(name, name), (-math.inf, math.inf))
        if isinstance(value, Mapping) and name.endswith("_config"):
            part = fields.get(name) or {}
            yield from _out_of_range(value, {**fields, **part}, part_type(model_type, name, part), key)
        elif DROPS.search(name) and is_number and not 0 <= value <= 1:
            yield ConfigError(key, value, "use a probability, from 0 to 1")
        elif is_number and not smallest <= value <= largest:
            wanted = f"from {smallest} to {largest}" if largest < math.inf else f"of at least {smallest}"
            yield ConfigError(key, value, f"use a number {wanted}")
        elif SPREADS.search(name) and is_number and not value >= 0:
            yield ConfigError(key, value, "use a number of at least 0")
        elif name == PADDING and is_number and isinstance(rows := fields.get("vocab_size"), int) and value >= rows:
            yield ConfigError(key, value, f"use an id below {rows}", f"the model's vocabulary has {rows} tokens")


def _odd_heads(overrides: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[ConfigError]:
    """The error of heads whose numbers are no pairs, which rotary positions turn; transformers' own rule."""
    family = str(fields["model_type"])
    known = config_class(family) or ConfigClass()
    names = [name for name in overrides if known.attribute_map.get(name, name) in (HEAD, HEADS, WIDTH)]
    if not names or not {HEAD, PARAMETERS} <= known.names or TURNED in fields or family in TURN_LESS:
        return
    parameters = fields.get(PARAMETERS)
    if PARTIAL in {*overrides, *(parameters if isinstance(parameters, Mapping) else ())}:
        return
    heads, width, size = fields.get(HEADS), fields.get(WIDTH), fields.get(HEAD)
    if not size and isinstance(heads, int) and isinstance(width, int):
        size = width // heads
    if isinstance(size, int) and size > SMALLEST_HEAD and size % 2:
        is_typed = overrides.get(HEAD) is not None
        name = HEAD if is_typed else next(name for name in names if name != HEAD)
        fix = f"use {size - 1} or {size + 1}" if is_typed else f"set model.config.{HEAD}={size + 1} too"
        reason = f"a head has {size} numbers, and rotary positions turn pairs of them"
        yield ConfigError(f"model.config.{name}", overrides[name], fix, reason)
