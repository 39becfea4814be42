"""Refuses sizes and counts that no model has, such as a width of 0, before transformers builds modules of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from mgpu_pipe.architectures.config_source import NO_DEFAULT, ConfigClass, config_class
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import BadInputError, ConfigError

COUNTS_PARTS = ("layer", "depth", "block", "stage", "label", "head", "expert")
MOST_PARTS, MOST = 1 << 16, 1 << 28
"""Largest number of parts, and of anything else, in a model's configuration."""
NOT_NEGATIVE = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
SIZES = re.compile(r"size|dim|width|inner|head|channel|kernel|stride|embd|d_model|d_ff|d_kv|ffn|expert|group|bins")
"""Fields that hold the size or the number of something."""
LENGTHS = re.compile(r"_positions|position_embeddings")
"""Fields that hold the length of an input."""
MAY_BE_ZERO = re.compile(r"shared|zero_expert|additional|window|chunk|nope|rope|per_layer|no_repeat|offset")
"""Fields where 0 means none."""
EXPERTS_MAY_BE_ZERO = frozenset(
    [
        *("flint", "granitemoehybrid", "jamba", "qwen2_moe", "qwen3_moe", "qwen3_next"),
        *("qwen3_omni_moe_text", "qwen3_omni_moe_talker_text", "qwen3_vl_moe_text"),
    ]
)
"""Model types whose layers are dense with 0 experts."""
OF_EXPERTS = re.compile(r"expert|moe")
"""Fields without effect where there are no experts."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields that hold the number of experts of a layer."""
POSITIONS_AFTER_PADDING = (
    *("altclip", "camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Families like RoBERTa, whose first position is ``pad_token_id + 1``; see :func:`usable_positions`."""
PartType = Callable[[str, str, Mapping[str, Any]], str]
"""Model type of a part: of the model's type, the part's field and its fields."""


def usable_positions(positions: int, padding: int | None, *model_types: str | None) -> int:
    """Tokens of the longest input of ``positions`` learned ones; RoBERTa's kin use none up to ``pad_token_id``."""
    return positions - first_position(padding, *model_types)


def first_position(padding: int | None, *model_types: str | None) -> int:
    """Position of the first token of a text, which RoBERTa's kin count from the one after ``pad_token_id``."""
    return 0 if padding is None or not set(model_types) & set(POSITIONS_AFTER_PADDING) else padding + 1


def size_errors(fields: Mapping[str, Any], model: ModelConfig, part_type: PartType) -> list[BadInputError]:
    """Errors of numbers in resolved ``fields`` that no model has."""
    for name, value in _numbers(fields, ""):
        last = name.rpartition(".")[2]
        counts_parts = any(word in last for word in COUNTS_PARTS)
        is_size = counts_parts or SIZES.search(last) or LENGTHS.search(last)
        if isinstance(value, float) and isfinite(value) and not is_size:
            continue  # a rotary base, a bound of gradients
        most = MOST_PARTS if counts_parts and "vocab" not in last else MOST
        if not abs(value) <= most:  # NaN is not
            fix, reason = f"use at most {most:,}", "no model is that large" if value == value else "this is no number"
        elif value < 0 and last in NOT_NEGATIVE:
            fix, reason = "use at least 0", "the number is below 0"
        else:
            continue
        key = f"model.config.{name}" if model.path is None or name in model.config else f"model.path={model.path}"
        return [ConfigError(key, value if key.endswith(name) else f"{name} {value}", fix, reason)]
    return list(_empty_sizes(model.config, fields, str(fields["model_type"]), part_type, "model.config"))


def _numbers(value: object, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, int | float) and not isinstance(value, bool) and not (abs(value) <= MOST and value % 1):
        yield path, value


def _empty_sizes(
    overrides: Mapping[str, Any], fields: Mapping[str, Any], model_type: str, part_type: PartType, within: str
) -> Iterator[BadInputError]:
    """Errors of sizes below 1 among the overrides of a model or a part of it; its class has some by default."""
    known = config_class(model_type) or ConfigClass()
    is_dense = model_type in EXPERTS_MAY_BE_ZERO and any(fields.get(name) == 0 for name in EXPERTS)
    for name, value in overrides.items():
        stored = known.attribute_map.get(name, name)
        if is_dense and OF_EXPERTS.search(stored):
            continue
        if name.endswith("_config") and isinstance(value, Mapping):
            part = fields.get(stored)
            part = part if isinstance(part, Mapping) else value
            yield from _empty_sizes(value, part, part_type(model_type, name, part), part_type, f"{within}.{name}")
        elif any(type(number) is int and number < 1 for number in _as_list(value)) and _is_never_zero(
            known, model_type, stored
        ):
            fix = "use at least 1, or null" if known.defaults.get(stored, 1) is None else "use at least 1"
            yield ConfigError(f"{within}.{name}", value, fix, "a model has some")


def _is_never_zero(known: ConfigClass, model_type: str, name: str) -> bool:
    """Whether a field holds a size or number that is at least 1 wherever it is given."""
    if not (SIZES.search(name) or LENGTHS.search(name)) or MAY_BE_ZERO.search(name):
        return False
    if name in EXPERTS and model_type in EXPERTS_MAY_BE_ZERO:
        return False
    default = known.defaults.get(name, NO_DEFAULT)
    return default is None or default is NO_DEFAULT or all(type(size) is int and size > 0 for size in _as_list(default))


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def largest_width(fields: Mapping[str, Any]) -> int:
    """Largest size in resolved fields of a model and its parts without the vocabulary, 0 if unknown; bounds its linear
    layers."""
    widths = [0]
    for name, value in fields.items():
        if isinstance(value, Mapping):
            widths.append(largest_width(value))
        elif isinstance(value, int) and SIZES.search(name) and "vocab" not in name:
            widths.append(value)
    return max(widths)
