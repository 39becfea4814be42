"""Compares two checkpoints tensor by tensor in blocks, so that no tensor is whole in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from pathlib import Path

import torch

from mgpu_pipe.checkpoint.layout import KINDS
from mgpu_pipe.checkpoint.live_tensors import blocks
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice

BATCH_BYTES = 64 * 1024 * 1024
"""Bytes of a batch of elements (as float64); each batch parses a file's header once."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose values differ."""

    name: str
    kind: str
    relative: float
    """``norm(a - b) / norm(a)``; infinite if a value is not finite on only one side, or ``a`` is zero."""
    largest: float
    """Largest ``|a - b|`` of an element."""


@dataclass
class Comparison:
    """Equal and differing tensors of two checkpoints."""

    equal: int = 0
    differing: list[TensorDifference] = field(default_factory=list)
    """Sorted by relative difference, largest first."""
    unlike: list[str] = field(default_factory=list)
    """Tensors of only one of the checkpoints, or of another shape."""

    @property
    def is_same(self) -> bool:
        return not self.differing and not self.unlike


def compare_tensors(a: Path, b: Path, kinds: tuple[str, ...] = KINDS) -> Comparison:
    """Compare the tensors of two step folders of any strategies; CheckpointError names a damaged file and chunk."""
    first, second = CheckpointReader(a), CheckpointReader(b)
    result = Comparison()
    if first.manifest.root == second.manifest.root:
        result.equal = sum(len(first.names(kind)) for kind in kinds)
        return result
    for kind in kinds:
        second_names, first_names = set(second.names(kind)), first.names(kind)
        result.unlike += [f"{name} is only in the first" for name in first_names if name not in second_names]
        result.unlike += [f"{name} is only in the second" for name in second_names - set(first_names)]
        common = []
        for name in first_names:
            if name in second_names and first.shape(name) != second.shape(name):
                result.unlike.append(f"{name} has the shapes {list(first.shape(name))} and {list(second.shape(name))}")
            elif name in second_names:
                common.append(name)
        sums = {name: _Sums() for name in common}
        for batch in _batches(first, common):
            _add_batch(first, second, kind, batch, sums)
        for name, total in sums.items():
            if total.difference or total.unlike:
                result.differing.append(TensorDifference(name, kind, total.relative, total.largest))
            else:
                result.equal += 1
    result.differing.sort(key=lambda difference: (-difference.relative, difference.kind, difference.name))
    return result


@dataclass
class _Sums:
    """Sums over the blocks of one tensor, in float64."""

    difference: float = 0.0
    reference: float = 0.0
    largest: float = 0.0
    unlike: bool = False
    """Whether a value is NaN or infinite on one side and different on the other."""

    @property
    def relative(self) -> float:
        if self.unlike or not isfinite(self.difference) or self.reference == 0:
            return inf
        return sqrt(self.difference / self.reference)


def _batches(reader: CheckpointReader, names: list[str]) -> Iterator[list[tuple[TensorSlice, tuple[int, ...]]]]:
    """Batches of blocks of the tensors, in the order of the files."""
    batch: list[tuple[TensorSlice, tuple[int, ...]]] = []
    size = 0
    for name in names:
        global_shape = reader.shape(name)
        for offsets, shape in blocks(global_shape, 8):
            tensor_slice = TensorSlice(name, offsets, shape)
            if size and size + 8 * tensor_slice.volume > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((tensor_slice, global_shape))
            size += 8 * tensor_slice.volume
    if batch:
        yield batch


def _add_batch(
    first: CheckpointReader,
    second: CheckpointReader,
    kind: str,
    batch: list[tuple[TensorSlice, tuple[int, ...]]],
    sums: dict[str, _Sums],
) -> None:
    shards = []
    for reader in (first, second):
        shards.append(
            [
                LocalShard(tensor_slice, global_shape, torch.empty(tensor_slice.shape, dtype=torch.float64))
                for tensor_slice, global_shape in batch
            ]
        )
        reader.read(shards[-1], kind)
    for a, b in zip(*shards, strict=True):
        total, left, right = sums[a.tensor_slice.name], a.tensor, b.tensor
        total.reference += float(left.square().sum())
        if torch.equal(left, right):
            continue
        equal = (left == right) | (left.isnan() & right.isnan())
        difference = torch.where(equal, 0.0, left - right)
        if not bool(difference.isfinite().all()):
            total.unlike, total.largest = True, inf
        total.difference += float(difference.square().sum())
        total.largest = max(total.largest, float(difference.abs().max()))
