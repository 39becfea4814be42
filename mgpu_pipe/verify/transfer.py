"""Transfers tensors between rank 0 and the ranks' local shards, without pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.host_bytes import DTYPES, dtype_name, exchange_json, select
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice, tiling_fault
from mgpu_pipe.errors import WorkerError

Tensors = dict[str, torch.Tensor]


def from_rank_0(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Broadcast of rank 0's CPU ``tensors``; those of other ranks are ignored. A collective call."""
    header = exchange_json([[name, dtype_name(t), list(t.shape)] for name, t in tensors.items()], None)[0]
    if dist.get_world_size() == 1:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    shapes = [torch.Size(shape) for _, _, shape in header]
    sizes = [shape.numel() * DTYPES[dtype].itemsize for (_, dtype, _), shape in zip(header, shapes, strict=True)]
    data = torch.empty(sum(sizes), dtype=torch.uint8)
    if dist.get_rank() == 0 and tensors:
        data = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors.values()])
    dist.broadcast(data, src=0)
    parts = data.split(sizes)
    return {
        name: part.clone().view(DTYPES[dtype]).view(shape)
        for (name, dtype, _), shape, part in zip(header, shapes, parts, strict=True)
    }


@torch.no_grad()
def fill(shards: Iterable[LocalShard], full: Mapping[str, torch.Tensor]) -> None:
    """Copies each local shard's part of the whole tensors ``full`` into it, in place.

    Raises:
        WorkerError: ``full`` lacks the tensor of a shard.
    """
    for shard in shards:
        shard.tensor.copy_(_part(full, shard.tensor_slice))


def squared_errors(shards: Iterable[LocalShard], full: Mapping[str, torch.Tensor]) -> list[list[object]]:
    """List of ``[name, offsets, shape, e]`` by local shard; e is the squared 2-norm of its difference from ``full``.

    A tensor that ``full`` lacks counts as zero; ``e`` is None if not finite, which JSON cannot express.
    """
    errors: list[list[object]] = []
    for shard in shards:
        difference = shard.tensor.detach().cpu().double()
        if shard.tensor_slice.name in full:
            difference = difference - _part(full, shard.tensor_slice).double()
        error = difference.square().sum()
        finite = bool(torch.isfinite(error))
        errors.append(
            [
                shard.tensor_slice.name,
                list(shard.tensor_slice.offsets),
                list(shard.tensor_slice.shape),
                float(error) if finite else None,
            ]
        )
    return errors


def whole_errors(
    what: str, by_rank: Iterable[Iterable[list[object]]], full: Mapping[str, torch.Tensor], partial: bool = False
) -> dict[str, float]:
    """2-norm of each whole tensor's difference, from all ranks' :func:`squared_errors`.

    A block on several ranks counts once, with its worst copy.

    Args:
        what: kind of the tensors, for errors.
        partial: whether a tensor may be missing on all ranks; it then counts as zero.

    Raises:
        WorkerError: the ranks' blocks do not cover a tensor exactly.
    """
    blocks: dict[str, dict[TensorSlice, float]] = {name: {} for name in full}
    for shards in by_rank:
        for name, offsets, shape, error in shards:
            tensor_slice = TensorSlice(str(name), tuple(offsets), tuple(shape))  # type: ignore[arg-type]
            value = float("inf") if error is None else float(error)  # type: ignore[arg-type]
            copies = blocks.setdefault(tensor_slice.name, {})
            copies[tensor_slice] = max(copies.get(tensor_slice, 0.0), value)
    errors: dict[str, float] = {}
    for name, copies in blocks.items():
        if not copies and partial:
            errors[name] = norm_of([full[name]])
            continue
        if name in full:
            fault = tiling_fault(tuple(full[name].shape), list(copies))
            if fault is not None:
                raise WorkerError(f"verify: the strategy's pieces of the {what} do not make up {name}: {fault}")
        errors[name] = sum(copies.values()) ** 0.5
    return errors


def check_covered(what: str, shards: Iterable[LocalShard], full: Mapping[str, torch.Tensor]) -> None:
    """Raises unless all ranks' local shards cover each tensor of ``full`` exactly once. A collective call."""
    mine = [
        [shard.tensor_slice.name, list(shard.tensor_slice.offsets), list(shard.tensor_slice.shape), 0.0]
        for shard in shards
    ]
    whole_errors(what, exchange_json(mine, None), full)


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """2-norm of all elements, in float64."""
    return sum(float(tensor.detach().double().square().sum()) for tensor in tensors) ** 0.5


def _part(full: Mapping[str, torch.Tensor], tensor_slice: TensorSlice) -> torch.Tensor:
    if tensor_slice.name not in full:
        raise WorkerError(f"verify: the strategy holds {tensor_slice.name}, which the plain computation does not have")
    return select(full[tensor_slice.name], tensor_slice.offsets, tensor_slice.shape)
