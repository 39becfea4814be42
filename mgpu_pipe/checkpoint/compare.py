"""How two checkpoints differ, tensor by tensor, read in blocks: no tensor is ever whole in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from pathlib import Path

import torch

from mgpu_pipe.checkpoint.host import blocks
from mgpu_pipe.checkpoint.layout import KINDS
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice

BATCH_BYTES = 64 * 1024 * 1024
"""Elements are read in batches of so many bytes (as float64): a file's header is parsed once a batch."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose values differ."""

    name: str
    kind: str
    relative: float
    """``norm(a - b) / norm(a)``; infinite where a value is not finite on one side alone, or ``a`` is zero."""
    largest: float
    """Largest ``|a - b|`` of an element."""


@dataclass
class Comparison:
    """Of the tensors of two checkpoints."""

    equal: int = 0
    differing: list[TensorDifference] = field(default_factory=list)
    """The largest relative difference first."""
    unlike: list[str] = field(default_factory=list)
    """Tensors of only one of the checkpoints, or of another shape."""

    @property
    def same(self) -> bool:
        return not self.differing and not self.unlike


def compare_tensors(a: Path, b: Path, kinds: tuple[str, ...] = KINDS) -> Comparison:
    """Compare the tensors of two step folders, whatever strategies wrote them; every chunk read is checked.

    Raises:
        CheckpointError: one of them is damaged; names file and chunk.
    """
    one, other = CheckpointReader(a), CheckpointReader(b)
    result = Comparison()
    if one.manifest.root == other.manifest.root:
        result.equal = sum(len(one.names(kind)) for kind in kinds)
        return result
    for kind in kinds:
        there, here = set(other.names(kind)), one.names(kind)
        result.unlike += [f"{name} is only in the first" for name in here if name not in there]
        result.unlike += [f"{name} is only in the second" for name in there - set(here)]
        both = []
        for name in here:
            if name in there and one.shape(name) != other.shape(name):
                result.unlike.append(f"{name} has the shapes {list(one.shape(name))} and {list(other.shape(name))}")
            elif name in there:
                both.append(name)
        sums = {name: _Sums() for name in both}
        for batch in _batches(one, both):
            _add(one, other, kind, batch, sums)
        for name, total in sums.items():
            if total.difference or total.unlike:
                result.differing.append(TensorDifference(name, kind, total.relative, total.largest))
            else:
                result.equal += 1
    result.differing.sort(key=lambda difference: (-difference.relative, difference.kind, difference.name))
    return result


@dataclass
class _Sums:
    """Of one tensor, in float64 over its blocks."""

    difference: float = 0.0
    reference: float = 0.0
    largest: float = 0.0
    unlike: bool = False
    """A value is NaN or infinite on one side, and something else on the other."""

    @property
    def relative(self) -> float:
        if self.unlike or not isfinite(self.difference) or self.reference == 0:
            return inf
        return sqrt(self.difference / self.reference)


def _batches(reader: CheckpointReader, names: list[str]) -> Iterator[list[tuple[TensorSlice, tuple[int, ...]]]]:
    """Blocks of the tensors, several together, in the order of the files."""
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


def _add(
    one: CheckpointReader,
    other: CheckpointReader,
    kind: str,
    batch: list[tuple[TensorSlice, tuple[int, ...]]],
    sums: dict[str, _Sums],
) -> None:
    shards = []
    for reader in (one, other):
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
        alike = (left == right) | (left.isnan() & right.isnan())
        difference = torch.where(alike, 0.0, left - right)
        if not bool(difference.isfinite().all()):
            total.unlike, total.largest = True, inf
        total.difference += float(difference.square().sum())
        total.largest = max(total.largest, float(difference.abs().max()))
