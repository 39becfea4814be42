"""Model settings to and from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.gguf_tokenizer import special_ids
from mgpu_pipe.inference.gguf.layouts import GGUF_FAMILIES

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

MAX_NUMBER = 2**31 - 1
FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotations' frequencies: llama 3's scaling."""
DIVIDED = "llama"
"""The only architecture here whose rotations llama.cpp divides by :data:`FREQUENCIES`."""


def model_type_of(file: GgufFile) -> str:
    """The ``model_type`` of the file's architecture.

    Raises:
        BadInputError: the architecture has no table.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise BadInputError(f"--from={file.path}: has no general.architecture; copy the file again, or give another")
    experts = file.metadata.get(f"{architecture}.expert_count")
    mixture = type(experts) is int and experts > 0
    for model_type, family in GGUF_FAMILIES.items():
        if family.architecture == architecture and mixture == ("expert_count" in family.fields):
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
    fields: dict[str, Any] = {field: source.number(key) for key, field in family.fields.items() if source.has(key)}
    missing = [key for key, field in family.fields.items() if field not in fields and key not in _OPTIONAL]
    if missing:
        raise source.refuse(f"has no {family.architecture}.{missing[0]}")
    if "token_embd.weight" not in file.tensors:
        raise source.refuse("has no token_embd.weight")
    fields["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    if file.tensors["token_embd.weight"].shape[1:] != (fields[family.fields["embedding_length"]],):
        raise source.refuse(f"has no token_embd.weight of {family.architecture}.embedding_length")
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    if fields[family.fields["block_count"]] > len(file.tensors):
        raise source.refuse(f"has fewer tensors than {family.architecture}.block_count")
    if family.is_rotary:
        fields.update(_rotations(file, source, fields, model_type))
    ids = special_ids(file)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = ids.get(key, -1)
        fields[f"{name}_token_id"] = number if 0 <= number < fields["vocab_size"] else None
    for flag, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_gate.bias")):
        if tensor in file.tensors and flag in _known_fields(model_type):
            fields[flag] = True
    return {**family.required, **fields}


_OPTIONAL = ("attention.head_count_kv", "attention.sliding_window")
GEMMA3_PERIOD = 6
"""Every sixth block of Gemma 3 attends to all tokens."""
GEMMA3_27B_LAYERS = 62
"""By this number of blocks llama.cpp knows gemma 3 of 27 thousand million parameters."""


def metadata_of(config: PretrainedConfig) -> dict[str, Any]:
    """The metadata of the settings of a model with a table.

    Raises:
        BadInputError: llama.cpp computes something else than these settings say.
    """
    family = GGUF_FAMILIES[config.model_type]
    for name, value in family.required.items():
        if getattr(config, name, value) != value:
            raise _refuse_setting(name, getattr(config, name))
    fields = {key: getattr(config, field, None) for key, field in family.fields.items()}
    if config.model_type == "gpt2":
        fields["feed_forward_length"] = config.n_inner or 4 * config.n_embd
    metadata = {f"{family.architecture}.{key}": value for key, value in fields.items() if value is not None}
    if family.is_rotary:
        size = head_size(config)
        sizes = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size)
        extra = {**sizes, **_scaling(config)}
        metadata |= {f"{family.architecture}.{key}": value for key, value in extra.items()}
    return {**metadata, f"{family.architecture}.vocab_size": config.vocab_size}


def head_size(config: PretrainedConfig) -> int:
    """Values of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def gemma3_scalar(layers: int, hidden: int, heads: int, size: int) -> int:
    """The number by whose root llama.cpp (``src/models/gemma3.cpp``) divides gemma 3's queries; ``size`` is a
    head's."""
    return hidden // heads if layers == GEMMA3_27B_LAYERS else size


def _refuse_setting(name: str, value: object) -> BadInputError:
    return BadInputError(f"--format=gguf: llama.cpp cannot compute {name}={value} of this family; use --format hf")


def _scaling(config: PretrainedConfig) -> dict[str, Any]:
    """Metadata of the rotations and of sliding windows."""
    parameters: dict[str, Any] = config.rope_parameters
    metadata: dict[str, Any] = {}
    window, period = getattr(config, "sliding_window", None), 0
    if config.model_type == "gemma3_text":
        metadata["rope.freq_base_swa"] = parameters["sliding_attention"]["rope_theta"]
        if parameters["sliding_attention"]["rope_type"] != "default":
            raise _refuse_setting("rope_parameters", parameters)
        parameters, period = parameters["full_attention"], GEMMA3_PERIOD
        scalar = gemma3_scalar(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, head_size(config)
        )
        if config.query_pre_attn_scalar != scalar:
            raise _refuse_setting("query_pre_attn_scalar", config.query_pre_attn_scalar)
    kinds = [
        "full_attention" if not period or not (i + 1) % period else "sliding_attention"
        for i in range(config.num_hidden_layers)
    ]
    types = getattr(config, "layer_types", None) or kinds
    if types != kinds:
        raise _refuse_setting("layer_types", types)
    slides = not period and window is not None and window < config.max_position_embeddings
    if slides and getattr(config, "use_sliding_window", True):
        raise _refuse_setting("sliding_window", window)
    kind = parameters["rope_type"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refuse_setting("partial_rotary_factor", parameters["partial_rotary_factor"])
    if kind == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": parameters["factor"]}
    elif kind != "default" and (kind != "llama3" or GGUF_FAMILIES[config.model_type].architecture != DIVIDED):
        raise _refuse_setting("rope_type", kind)
    return {**metadata, "rope.freq_base": parameters["rope_theta"]}


def frequency_divisors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensor of llama 3's scaling, by its name; empty without it."""
    import torch

    config = model.config
    if not GGUF_FAMILIES[config.model_type].is_rotary or config.rope_parameters.get("rope_type") != "llama3":
        return {}
    size = head_size(config)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    scaled = model.get_submodule("model.rotary_emb").inv_freq
    return {FREQUENCIES: (config.rope_parameters["rope_theta"] ** -exponents / scaled).float()}


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


def _rotations(file: GgufFile, source: _Metadata, fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of the rotary positions: size of a head and ``rope_parameters``."""
    default = fields["hidden_size"] // fields["num_attention_heads"]
    size = int(source.number("attention.key_length")) if source.has("attention.key_length") else default
    rotated = int(source.number("rope.dimension_count")) if source.has("rope.dimension_count") else size
    if rotated != size:
        raise source.refuse(f"rotates {rotated} of a head's {size} values, which is not supported")
    if not size or size % 2:
        raise source.refuse(f"rotates heads of {size} values, and rotations take pairs")
    rotations: dict[str, Any] = {
        "num_key_value_heads": fields.get("num_key_value_heads", fields["num_attention_heads"])
    }
    if "head_dim" in _known_fields(model_type):
        queries, heads = file.tensors.get("blk.0.attn_q.weight"), fields["num_attention_heads"]
        if queries is None or queries.shape[0] != heads * size:
            raise source.refuse(f"has no blk.0.attn_q.weight of {heads} heads of {size} values")
        rotations["head_dim"] = size
    elif size != default:
        raise source.refuse(f"has heads of {size}, and {model_type} needs {default}")
    base = source.number("rope.freq_base") if source.has("rope.freq_base") else 10_000.0
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    factor = _linear_factor(source)
    if factor != 1:
        parameters |= {"rope_type": "linear", "factor": factor}
    elif FREQUENCIES in file.tensors and source.architecture == DIVIDED:
        parameters |= _llama3_scaling(file, base, size)
    if model_type == "gemma3_text":
        local = source.number("rope.freq_base_swa") if source.has("rope.freq_base_swa") else 10_000.0
        sliding = {"rope_type": "default", "rope_theta": local}
        heads = fields["num_attention_heads"]
        rotations["query_pre_attn_scalar"] = gemma3_scalar(
            fields["num_hidden_layers"], fields["hidden_size"], heads, size
        )
        return {**rotations, "rope_parameters": {"full_attention": parameters, "sliding_attention": sliding}}
    return {**rotations, "rope_parameters": parameters}


def _linear_factor(source: _Metadata) -> int | float:
    """Divisor of positions, with keys of llama.cpp's ``src/llama-model.cpp``; BadInputError for other scaling."""
    kind = source.values.get(f"{source.architecture}.rope.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in ("linear", "none"):
        raise source.refuse(f"scales its rotations by {kind!r}, which is not supported")
    key = "rope.scaling.factor" if source.has("rope.scaling.factor") else "rope.scale_linear"
    factor = source.values.get(f"{source.architecture}.{key}", 0.0)
    return 1 if kind == "none" or (type(factor) is float and not factor) else source.number(key)


def _llama3_scaling(file: GgufFile, base: float, size: int) -> dict[str, Any]:
    """Llama 3's scaling by the file's divisors; BadInputError if they follow from other constants than Llama 3's."""
    import torch

    if file.tensors[FREQUENCIES].shape != (size // 2,):
        shape = list(file.tensors[FREQUENCIES].shape)
        raise BadInputError(
            f"--from={file.path}: {FREQUENCIES} has the shape {shape} for [{size // 2}]; copy the file again"
        )
    divisors = file.read(FREQUENCIES)
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies = base ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    smooth = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not torch.allclose(divisors, expected, rtol=1e-4):
        raise BadInputError(f"--from={file.path}: {FREQUENCIES} is not Llama 3's scaling; give another file")
    return scaling


def _known_fields(model_type: str) -> set[str]:
    known = config_class(model_type)
    return set(known.annotations) if known is not None else set()
