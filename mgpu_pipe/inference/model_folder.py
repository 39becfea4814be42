"""Writes a model's weights as a Hugging Face folder, a few tensors in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.checkpoint.live_tensors import dtype_name, host_bytes
from mgpu_pipe.checkpoint.tensor_file import Entry, write_tensor_file
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.open import ReadTensor
from mgpu_pipe.models.adapters.lora import EXPERTS, adapter_of, is_adapter, lora_layers, merge_adapters
from mgpu_pipe.models.adapters.low_rank import as_rows
from mgpu_pipe.models.adapters.peft_folder import (
    ADAPTER_SETTINGS,
    ADAPTER_WEIGHTS,
    TYING,
    lengths,
    magnitude_layer,
    name_in_peft,
    other_names,
)
from mgpu_pipe.models.fields import class_of
from mgpu_pipe.models.weights.folder import INDEX, WEIGHTS
from mgpu_pipe.models.weights.model_files import SavedGroup, convert_for_saving, saved_groups, write_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgpu_pipe.inference.open import StoredModel


TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}


def has_adapters(stored: StoredModel) -> bool:
    return adapter_of(stored.model).name != "none"


def merge_stored(stored: StoredModel) -> StoredModel:
    """``stored`` without adapters: reading a weight merges its adapter into it, in fp32.

    Changes the model of ``stored``.
    """
    weights = {
        f"{name}.{weight}": (layer, {part: f"{name}.{parameter}" for part, parameter in names.items()}, layer.merge)
        for name, layer in lora_layers(stored.model)
        for weight, names in layer.adapter_names().items()
    }
    scale = adapter_of(stored.model).scale
    merge_adapters(stored.model)

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in weights:
            return stored.read(name, dtype)
        layer, names, merge = weights[name]
        adapter = {part: stored.read(parameter, torch.float32) for part, parameter in names.items()}
        merged = merge(as_rows(layer, stored.read(name, torch.float32)), scale, adapter)
        return as_rows(layer, merged).to(dtype)

    return replace(stored, read=read)


def write_adapter(stored: StoredModel, out: Path, dtype: torch.dtype) -> None:
    """Write the adapters of ``stored`` into the existing folder ``out`` in peft's format: configuration and weights.

    Raises:
        BadInputError: a peft folder has no place for other trained weights.
        OSError: the folder cannot be written.
    """
    model, keys = stored.model, adapter_of(stored.model)
    layers = lora_layers(model)
    if EXPERTS in keys.targets:
        raise BadInputError("--format=peft: peft names adapters of packed experts by their order; use --merge")
    every = dict(model.named_parameters(remove_duplicate=False))
    trained = {
        name: parameter for name, parameter in every.items() if parameter.requires_grad
    }  # a tied weight has all its names
    modules = _modules_to_save(every, trained)
    targets = [name for name, _ in layers]
    for names in (targets, modules):
        reached = sorted(_modules_matched_by(model, names) - set(names))
        if reached:
            reason = f"peft takes the end of a name, and {reached[0]} ends like one that is trained"
            raise BadInputError(f"--format=peft: {reason}; use --merge")
    config = {
        "peft_type": "LORA",
        "task_type": TASKS.get(class_of([type(model).__name__])),
        "base_model_name_or_path": None if stored.maker is None else str(stored.maker),
        "r": keys.r,
        "lora_alpha": keys.alpha,
        "lora_dropout": keys.dropout,
        "use_rslora": keys.rslora,
        "use_dora": keys.name == "dora",
        "target_modules": targets,
        "fan_in_fan_out": isinstance(layers[0][1], Conv1D),
        "modules_to_save": modules or None,
        "bias": "none",
        "inference_mode": True,
    }
    if any(name in trained for name in other_names(model)):
        config[TYING] = True  # older versions of peft refuse the field
    (out / ADAPTER_SETTINGS).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored_type = dtype_name(torch.empty(0, dtype=dtype))
    entries = [Entry(name_in_peft(name), stored_type, tuple(value.shape)) for name, value in trained.items()]
    parts = (part for name in trained for part in host_bytes(_read_for_peft(stored, name, dtype)))
    write_tensor_file(out / ADAPTER_WEIGHTS, entries, {"format": "pt"}, parts)


def _modules_to_save(every: Collection[str], trained: Collection[str]) -> list[str]:
    """Modules trained next to the adapters, by names of parameters; BadInputError if peft cannot save one."""
    modules = sorted({name.rpartition(".")[0] for name in trained if not is_adapter(name)})
    whole = {name for name in every if name.startswith(tuple(f"{module}." for module in modules))}
    if not whole <= set(trained):
        missing = sorted(whole - set(trained))[0]
        raise BadInputError(f"--format=peft: peft saves whole modules, and {missing} is not trained; use --merge")
    for module in modules:
        if any(module.startswith(f"{other}.") for other in modules):
            raise BadInputError(
                f"--format=peft: peft saves whole modules, and {module} is inside another one; use --merge"
            )
    return modules


def _modules_matched_by(model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """Modules that peft matches by ``names``: equal to one, or ending in a dot and one."""
    known, endings = set(names), tuple(f".{name}" for name in names)
    return {name for name, _ in model.named_modules() if name in known or (endings and name.endswith(endings))}


def _read_for_peft(stored: StoredModel, name: str, dtype: torch.dtype) -> torch.Tensor:
    layer = magnitude_layer(name)
    if layer is None:
        return stored.read(name, dtype)
    norms = lengths(stored.model, layer, stored.read(f"{layer}.weight", torch.float32))
    return (norms + stored.read(name, torch.float32)).to(dtype)


MAX_SHARD_BYTES = 5_000_000_000
"""Largest weight file, as the Hub advises: https://huggingface.co/docs/hub/models-uploading."""


def write_model_folder(
    model: PreTrainedModel,
    read: ReadTensor,
    out: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    maker: Path | None = None,
) -> list[str]:
    """Write configuration and weights into the existing folder ``out``; flushes each file.

    Args:
        model: its parameters may be on the meta device; its buffers are real.
        read: returns a whole parameter or buffer.
        dtype: of the written parameters; buffers keep theirs.
        max_shard_bytes: limit of a file, unless a single tensor is larger.
        maker: the model folder whose generation settings are copied.

    Returns:
        The weight files' names.

    Raises:
        OSError: the folder cannot be written.
    """
    groups = saved_groups(model)
    entries = [
        Entry(name, dtype_name(torch.empty(0, dtype=kind)), shape)
        for group in groups
        for kind in [_saved_dtype(model, group, dtype)]
        for name, shape in group.outputs.items()
    ]
    shards = _shards(entries, max_shard_bytes)
    names = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    )
    tensors = _tensors(model, groups, read, dtype)
    for name, shard in zip(names, shards, strict=True):
        write_tensor_file(out / name, shard, {"format": "pt"}, _read_bytes(shard, tensors))
    if len(shards) > 1:
        total = {
            "total_parameters": sum(tensor.numel() for tensor in model.parameters()),
            "total_size": sum(entry.nbytes for entry in entries),
        }
        shard_of = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        text = json.dumps({"metadata": total, "weight_map": dict(sorted(shard_of.items()))}, indent=2)
        (out / INDEX).write_text(text + "\n", encoding="utf-8")
    write_configuration(model, out, dtype, maker)
    return names


def _shards(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Consecutive entries of at most ``limit`` bytes together."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _saved_dtype(model: PreTrainedModel, group: SavedGroup, dtype: torch.dtype) -> torch.dtype:
    buffers = dict(model.named_buffers())
    dtypes = {buffers[name].dtype for name in group.sources if name in buffers}
    return dtypes.pop() if len(dtypes) == 1 else dtype


def _tensors(
    model: PreTrainedModel, groups: Sequence[SavedGroup], read: ReadTensor, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's tensors in order; holds one group in memory at a time."""
    for group in groups:
        kind = _saved_dtype(model, group, dtype)
        done = convert_for_saving(model, {name: read(name, kind) for name in group.sources})
        for name in group.outputs:
            yield name, done.pop(name)


def _read_bytes(shard: Sequence[Entry], tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    for entry in shard:
        name, tensor = next(tensors)
        assert name == entry.name and tuple(tensor.shape) == entry.shape
        yield from host_bytes(tensor)
        del tensor  # before the next is read
