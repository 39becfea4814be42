"""Writes a model's weights as a Hugging Face folder, a few tensors in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mgpu_pipe.checkpoint.host import dtype_name, host_bytes
from mgpu_pipe.checkpoint.tensor_file import Entry, write_tensor_file
from mgpu_pipe.inference.load import ReadTensor
from mgpu_pipe.models.folder import INDEX, WEIGHTS
from mgpu_pipe.models.save import SavedGroup, convert_for_saving, saved_groups, write_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    """Write configuration and weights into the existing folder ``out``, each file flushed.

    Args:
        model: its parameters may be on the meta device; its buffers are real.
        read: gives a parameter or buffer whole.
        dtype: of the parameters written; buffers keep theirs.
        max_shard_bytes: of one file, unless a single tensor is larger.
        maker: the model folder whose way of generating is kept.

    Returns:
        The weight files' names.

    Raises:
        OSError: it cannot be written.
    """
    groups = saved_groups(model)
    entries = [
        Entry(name, dtype_name(torch.empty(0, dtype=kind)), shape)
        for group in groups
        for kind in [_dtype_of(model, group, dtype)]
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
        write_tensor_file(out / name, shard, {"format": "pt"}, _bytes_of(shard, tensors))
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


def _dtype_of(model: PreTrainedModel, group: SavedGroup, dtype: torch.dtype) -> torch.dtype:
    buffers = dict(model.named_buffers())
    kept = {buffers[name].dtype for name in group.sources if name in buffers}
    return kept.pop() if len(kept) == 1 else dtype


def _tensors(
    model: PreTrainedModel, groups: Sequence[SavedGroup], read: ReadTensor, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's tensors in order; one group of them is in memory at a time."""
    for group in groups:
        kind = _dtype_of(model, group, dtype)
        done = convert_for_saving(model, {name: read(name, kind) for name in group.sources})
        for name in group.outputs:
            yield name, done[name]


def _bytes_of(shard: Sequence[Entry], tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    for entry in shard:
        name, tensor = next(tensors)
        assert name == entry.name and tuple(tensor.shape) == entry.shape
        yield from host_bytes(tensor)
