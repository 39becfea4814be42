"""Model settings to and from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.layouts import GGUF_FAMILIES

MAX_NUMBER = 2**31 - 1
FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotations' frequencies: llama 3's scaling."""


def model_type_of(file: GgufFile) -> str:
    """The ``model_type`` of the file's architecture.

    Raises:
        BadInputError: the architecture has no table.
    """
    architecture = file.metadata.get("general.architecture")
    for model_type, family in GGUF_FAMILIES.items():
        if family.architecture == architecture:
            return model_type
    known = ", ".join(dict.fromkeys(family.architecture for family in GGUF_FAMILIES.values()))
    raise BadInputError(
        f"--from={file.path}: general.architecture={architecture}: cannot be imported; give a file of {known}"
    )


def settings_of(file: GgufFile, model_type: str) -> dict[str, Any]:
    """The configuration fields of ``model_type`` that the file's metadata gives.

    Raises:
        BadInputError: a number is missing or out of range, or the file uses what is not supported.
    """
    family, source = (
        GGUF_FAMILIES[model_type],
        _Metadata(file.path, file.metadata, GGUF_FAMILIES[model_type].architecture),
    )
    fields = {field: source.number(key) for key, field in family.fields.items() if source.has(key)}
    missing = [key for key, field in family.fields.items() if field not in fields and key not in _OPTIONAL]
    if missing:
        raise source.refuse(f"has no {family.architecture}.{missing[0]}")
    if "token_embd.weight" not in file.tensors:
        raise source.refuse("has no token_embd.weight")
    fields["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    if fields[family.fields["block_count"]] > len(file.tensors):
        raise source.refuse(f"has fewer tensors than {family.architecture}.block_count")
    if family.is_rotary:
        fields.update(_rotations(source, fields, model_type))
    for flag, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_gate.bias")):
        if tensor in file.tensors and flag in _known_fields(model_type):
            fields[flag] = True
    return {**family.required, **fields}


_OPTIONAL = ("attention.head_count_kv",)


class _Metadata:
    """Metadata of one architecture, with its numbers checked."""

    def __init__(self, path: Path, values: Mapping[str, Any], architecture: str) -> None:
        self.path, self.values, self.architecture = path, values, architecture

    def refuse(self, problem: str) -> BadInputError:
        return BadInputError(f"--from={self.path}: {problem}; copy the file again, or give another")

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def number(self, key: str) -> int | float:
        value = self.values.get(f"{self.architecture}.{key}")
        if type(value) is int and 0 < value <= MAX_NUMBER:
            return value
        if type(value) is float and 0 < value < float("inf"):
            return float(str(np.float32(value)))  # the shortest decimal number that fp32 rounds to it
        raise self.refuse(f"{self.architecture}.{key} is {value!r} and not a number above 0")


def _rotations(source: _Metadata, fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of the rotary positions: size of a head and ``rope_parameters``."""
    default = fields["hidden_size"] // fields["num_attention_heads"]
    size = int(source.number("attention.key_length")) if source.has("attention.key_length") else default
    rotated = int(source.number("rope.dimension_count")) if source.has("rope.dimension_count") else size
    if rotated != size:
        raise source.refuse(f"rotates {rotated} of a head's {size} values, which is not supported")
    rotations: dict[str, Any] = {
        "num_key_value_heads": fields.get("num_key_value_heads", fields["num_attention_heads"])
    }
    if "head_dim" in _known_fields(model_type):
        rotations["head_dim"] = size
    elif size != default:
        raise source.refuse(f"has heads of {size}, and {model_type} needs {default}")
    base = source.number("rope.freq_base") if source.has("rope.freq_base") else 10_000.0
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    kind = source.values.get(f"{source.architecture}.rope.scaling.type", "none")
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": source.number("rope.scaling.factor")}
    elif kind != "none":
        raise source.refuse(f"scales its rotations by {kind!r}, which is not supported")
    return {**rotations, "rope_parameters": parameters}


def _known_fields(model_type: str) -> set[str]:
    known = config_class(model_type)
    return set(known.annotations) if known is not None else set()
