"""Loads checkpoints: each rank fills its local shards from the stored tensor slices and reads only what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from mgpu_pipe.checkpoint.layout import CONFIG
from mgpu_pipe.checkpoint.left_out import LeftOut
from mgpu_pipe.checkpoint.live_tensors import DTYPES, SLICE_BYTES, blocks, byte_view, select
from mgpu_pipe.checkpoint.manifest import (
    Manifest,
    StoredTensor,
    Verify,
    check_sizes,
    read_manifest,
    read_small_file,
    read_state,
)
from mgpu_pipe.checkpoint.tensor_file import ITEM_BYTES, Entry, TensorFile
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import CheckpointError

MIN_GAP_BYTES = 4096
"""Smallest gap in bytes between separate reads; the kernel reads whole pages anyway."""

_MAX_DIFFERENCES_SHOWN = 8


@dataclass(frozen=True)
class _Part:
    """The intersection ``tensor_slice`` of the stored ``source`` and ``shard``."""

    source: TensorSlice
    tensor_slice: TensorSlice
    shard: LocalShard


class CheckpointReader:
    """A step's folder, opened for reading.

    Args:
        folder: the folder with manifest.json.
        verify: ``full`` checks the SHA-256 of every chunk on its first read; ``size`` checks that all files exist with
            their sizes; ``off`` checks only what memory safety needs.

    Raises:
        CheckpointError: the manifest is invalid, a file is missing or of another size, or state.json is damaged.
    """

    def __init__(self, folder: Path, verify: Verify = "full") -> None:
        self.folder = folder
        self.verify = verify
        self.manifest: Manifest = read_manifest(folder)
        if verify != "off":
            check_sizes(folder, self.manifest)
        self.state: dict[str, Any] = read_state(folder, self.manifest, verify)
        self.left_out = LeftOut.from_state(self.state, folder)
        """Frozen weights in another folder. The caller fills them after :meth:`LeftOut.require`."""
        self.bytes_read = 0
        """Bytes of tensor files read so far, with headers and whole checked chunks."""

    @property
    def config_text(self) -> str:
        """The saved configuration as YAML text."""
        return read_small_file(self.folder, CONFIG, self.manifest, self.verify).decode("utf-8")

    def names(self, kind: str) -> list[str]:
        """Names of all tensors of ``kind``, "model" or "optimizer"."""
        return list(self.manifest.tensors[kind])

    def shape(self, name: str) -> tuple[int, ...]:
        """The unsharded shape of a tensor of either kind; only names of optimizer state contain a "/"."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor of either kind."""
        return DTYPES[self._tensor(name).dtype]

    def _tensor(self, name: str) -> StoredTensor:
        for tensors in self.manifest.tensors.values():
            if name in tensors:
                return tensors[name]
        raise CheckpointError(f"{self.folder}: holds no tensor {name}")

    def differences(self, expected: Mapping[str, Sequence[int]], kind: str) -> list[str]:
        """Differences of the checkpoint's tensors from ``name -> whole shape`` of a live model or optimizer."""
        extra = [f"{name} is only in the checkpoint" for name in self.manifest.tensors[kind] if name not in expected]
        return self._list_unfilled(expected, kind) + extra

    def require(self, expected: Mapping[str, Sequence[int]], kind: str) -> None:
        """Refuse a checkpoint of another model or optimizer.

        Args:
            expected: ``name -> whole shape`` of all tensors, over all ranks.

        Raises:
            CheckpointError: there are differences; the error lists them.
        """
        self._refuse(self.differences(expected, kind), kind)

    def read(self, shards: Sequence[LocalShard], kind: str) -> None:
        """Fill the local shards' tensors in place, except those of :attr:`left_out`. Not collective.

        Pass all local shards at once, because each call reads and checks a chunk once. Reading converts values to the
        live tensor's dtype. A tensor may be any view on any device.

        Raises:
            CheckpointError: a name is missing or a shape differs (the error lists all), before any read; or a chunk is
                damaged (the error names file and chunk), after some local shards may have been filled.
        """
        self._refuse(self._list_unfilled({shard.tensor_slice.name: shard.global_shape for shard in shards}, kind), kind)
        parts: dict[str, list[_Part]] = {}
        elsewhere = self._elsewhere(kind)
        for shard in shards:
            if shard.tensor_slice.name in elsewhere:
                continue
            if tuple(shard.tensor.shape) != shard.tensor_slice.shape:
                raise ValueError(
                    f"{shard.tensor_slice.key}: the tensor's shape {list(shard.tensor.shape)} is not its slice's"
                )
            for source, file in self.manifest.tensors[kind][shard.tensor_slice.name].tensor_slices:
                overlap = source.intersection(shard.tensor_slice)
                if overlap is not None:
                    parts.setdefault(file, []).append(_Part(source, overlap, shard))
        for name in sorted(parts):
            self._read_from(name, parts[name], self.manifest.tensors[kind])

    def _list_unfilled(self, expected: Mapping[str, Sequence[int]], kind: str) -> list[str]:
        stored = self.manifest.tensors[kind]
        elsewhere = self._elsewhere(kind)
        missing = [
            f"{name} is not in the checkpoint" for name in expected if name not in stored and name not in elsewhere
        ]
        return missing + [
            f"{name} has the shape {list(stored[name].shape)} in the checkpoint and {list(shape)} here"
            for name, shape in expected.items()
            if name in stored and stored[name].shape != tuple(shape)
        ]

    def _elsewhere(self, kind: str) -> set[str]:
        return set(self.left_out.names) if self.left_out is not None and kind == "model" else set()

    def _refuse(self, differences: Sequence[str], kind: str) -> None:
        if differences:
            listed = "; ".join(differences[:_MAX_DIFFERENCES_SHOWN])
            more = len(differences) - _MAX_DIFFERENCES_SHOWN
            rest = f"; and {more} more" if more > 0 else ""
            raise CheckpointError(f"{self.folder}: is a checkpoint of another {kind}: {listed}{rest}")

    def _read_from(self, name: str, parts: list[_Part], tensors: Mapping[str, StoredTensor]) -> None:
        """Fill every part from one file, in the file's order."""
        with TensorFile(self.folder / name, self.manifest.files[name] if self.verify == "full" else None) as file:
            step = file.metadata.get("step")
            if step != str(self.manifest.step):
                raise CheckpointError(f"{file.path}: is a file of step {step}, the manifest's is {self.manifest.step}")
            placed = [(_locate(file, part.source, tensors[part.tensor_slice.name].dtype), part) for part in parts]
            for start, part in sorted(placed, key=lambda item: (item[0], item[1].tensor_slice.offsets)):
                _fill(file, start, part, tensors[part.tensor_slice.name].dtype)
            self.bytes_read += file.data.bytes_read


def _locate(file: TensorFile, source: TensorSlice, dtype: str) -> int:
    """First byte of a stored tensor slice, after a check that the file's header agrees with the manifest."""
    stored = file.entries.get(source.key)
    if stored is None or stored.entry != Entry(source.key, dtype, source.shape):
        found_text = f"{stored.entry.dtype} {list(stored.entry.shape)}" if stored else "nothing"
        raise CheckpointError(
            f"{file.path}: holds {found_text} under {source.key}, the manifest says {dtype} {list(source.shape)}"
        )
    return stored.start


def _fill(file: TensorFile, start: int, part: _Part, dtype: str) -> None:
    in_source = _relative(part.tensor_slice, part.source)
    in_shard = _relative(part.tensor_slice, part.shard.tensor_slice)
    target = part.shard.tensor.detach()
    for offsets, shape in blocks(part.tensor_slice.shape, ITEM_BYTES[dtype]):
        source_offsets = tuple(a + b for a, b in zip(in_source, offsets, strict=True))
        shard_offsets = tuple(a + b for a, b in zip(in_shard, offsets, strict=True))
        place = select(target, shard_offsets, shape)
        as_stored = place.device.type == "cpu" and place.is_contiguous() and place.dtype == DTYPES[dtype]
        block = place if as_stored else torch.empty(shape, dtype=DTYPES[dtype])
        _read_block(file, start, part.source.shape, source_offsets, block)
        if block is not place:
            place.copy_(block)
        del block  # before the next is made


def _relative(tensor_slice: TensorSlice, origin: TensorSlice) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(tensor_slice.offsets, origin.offsets, strict=True))


@dataclass(frozen=True)
class _Rows:
    """``count`` runs of ``run`` elements each, at a distance of ``stride`` elements."""

    first: int
    count: int
    run: int
    stride: int


def _rows(global_shape: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[_Rows]:
    """Positions of a block's elements in a row-major tensor, in the block's row-major order."""
    strides = [prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    split = len(global_shape)  # dims from here on are whole, so they form one run with the dim before them
    while split > 0 and shape[split - 1] == global_shape[split - 1]:
        split -= 1
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    run = prod(shape[max(split - 1, 0) :])
    if split <= 1:
        yield _Rows(first, 1, run, run)
        return
    row_dim = split - 2
    for outer in product(*(range(size) for size in shape[:row_dim])):
        start = first + sum(index * stride for index, stride in zip(outer, strides, strict=False))
        yield _Rows(start, shape[row_dim], run, strides[row_dim])


def _read_block(
    file: TensorFile, start: int, global_shape: tuple[int, ...], offsets: tuple[int, ...], block: torch.Tensor
) -> None:
    """Read the block at ``offsets`` of a stored tensor of ``global_shape``, whose data begins at byte ``start``."""
    item = block.element_size()
    target = byte_view(block)
    done = 0
    for rows in _rows(global_shape, offsets, tuple(block.shape)):
        run_bytes, stride_bytes = rows.run * item, rows.stride * item
        position = start + rows.first * item
        if rows.count == 1 or stride_bytes - run_bytes >= MIN_GAP_BYTES:
            for row in range(rows.count):
                file.read_into(position + row * stride_bytes, target[done : done + run_bytes])
                done += run_bytes
            continue
        step = max(1, SLICE_BYTES // stride_bytes)
        for row in range(0, rows.count, step):
            count = min(step, rows.count - row)
            span = torch.empty((count - 1) * stride_bytes + run_bytes, dtype=torch.uint8)
            file.read_into(position + row * stride_bytes, byte_view(span))
            runs = span.as_strided((count, run_bytes), (stride_bytes, 1))
            out = block.reshape(-1).view(torch.uint8)[done : done + count * run_bytes]
            out.view(count, run_bytes).copy_(runs)
            done += count * run_bytes
