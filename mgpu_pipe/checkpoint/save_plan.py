"""Assigns tensor slices to ranks for writing; a pure function of all ranks' shards, so all compute the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_pipe.checkpoint.layout import KINDS, tensor_file_name
from mgpu_pipe.checkpoint.manifest import StoredTensor
from mgpu_pipe.checkpoint.tensor_file import ITEM_BYTES
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice, tiling_fault
from mgpu_pipe.errors import CheckpointSaveError


@dataclass(frozen=True)
class RankShards:
    """A rank's local shards of the weights, and those of the optimizer's state, named ``<parameter>/<state key>``."""

    model: Sequence[LocalShard]
    optimizer: Sequence[LocalShard]

    @property
    def by_kind(self) -> dict[str, Sequence[LocalShard]]:
        return dict(zip(KINDS, (self.model, self.optimizer), strict=True))


@dataclass(frozen=True)
class ShardRecord:
    """A rank's tensor slice, with kind, shape and dtype of its tensor."""

    kind: str
    tensor_slice: TensorSlice
    global_shape: tuple[int, ...]
    dtype: str

    def to_json(self) -> list[object]:
        tensor_slice = self.tensor_slice
        return [
            self.kind,
            tensor_slice.name,
            list(tensor_slice.offsets),
            list(tensor_slice.shape),
            list(self.global_shape),
            self.dtype,
        ]

    @classmethod
    def from_json(cls, value: Sequence[object]) -> ShardRecord:
        kind, name, offsets, shape, global_shape, dtype = value
        tensor_slice = TensorSlice(str(name), tuple(offsets), tuple(shape))  # type: ignore[arg-type]
        return cls(str(kind), tensor_slice, tuple(global_shape), str(dtype))  # type: ignore[arg-type]


def plan_files(by_rank: Sequence[Sequence[ShardRecord]]) -> dict[str, dict[str, StoredTensor]]:
    """Assign every tensor slice to the file of exactly one of its holders, balancing bytes.

    Each slice, the largest first, goes to the least loaded of its holders (the lowest rank of equals). Empty slices of
    a nonempty tensor (a rank without a shard) are left out.

    Args:
        by_rank: each rank's records, in the order of ranks.

    Returns:
        ``[kind][name]``: the manifest's tensors.

    Raises:
        CheckpointSaveError: ranks disagree on a tensor's shape or dtype, a rank lists a tensor slice twice, or the
            tensor slices do not cover each tensor exactly once.
    """
    holders: dict[tuple[str, TensorSlice], list[int]] = {}
    types: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for rank, records in enumerate(by_rank):
        for record in records:
            tensor = f"{record.kind} tensor {record.tensor_slice.name}"
            tensor_type = (record.global_shape, record.dtype)
            known = types.setdefault((record.kind, record.tensor_slice.name), tensor_type)
            if known != tensor_type:
                raise CheckpointSaveError(
                    f"{tensor}: rank {rank} has {_describe(tensor_type)}, another rank {_describe(known)}"
                )
            if record.tensor_slice.volume == 0 and 0 not in record.global_shape:
                continue
            ranks = holders.setdefault((record.kind, record.tensor_slice), [])
            if ranks and ranks[-1] == rank:  # ranks come in order
                raise CheckpointSaveError(f"{tensor}: rank {rank} lists {record.tensor_slice.key} twice")
            ranks.append(rank)
    writers = _deal(holders, {key: ITEM_BYTES[dtype] for key, (_, dtype) in types.items()}, len(by_rank))
    tiles: dict[tuple[str, str], list[tuple[TensorSlice, str]]] = {key: [] for key in types}
    for (kind, tensor_slice), rank in writers.items():
        tiles[kind, tensor_slice.name].append((tensor_slice, tensor_file_name(kind, rank)))
    tensors: dict[str, dict[str, StoredTensor]] = {kind: {} for kind in KINDS}
    for (kind, name), slices in sorted(tiles.items()):
        shape, dtype = types[kind, name]
        fault = tiling_fault(shape, [tensor_slice for tensor_slice, _ in slices])
        if fault:
            raise CheckpointSaveError(f"{kind} tensor {name} of shape {list(shape)} is not held exactly once: {fault}")
        tensors[kind][name] = StoredTensor(shape, dtype, tuple(sorted(slices)))
    return tensors


def _deal(
    holders: dict[tuple[str, TensorSlice], list[int]], item_bytes: dict[tuple[str, str], int], world_size: int
) -> dict[tuple[str, TensorSlice], int]:
    """The rank that writes each slice.

    Args:
        holders: the ranks that have each slice of a kind.
        item_bytes: bytes of an element, by kind and tensor.
    """

    def nbytes(key: tuple[str, TensorSlice]) -> int:
        return key[1].volume * item_bytes[key[0], key[1].name]

    load = [0] * world_size
    writers: dict[tuple[str, TensorSlice], int] = {}
    # Tensor slices with one holder come first, because there is no choice; the others balance around them.
    for key in sorted(holders, key=lambda k: (len(holders[k]) > 1, -nbytes(k), k)):
        rank = min(holders[key], key=lambda r: (load[r], r))
        load[rank] += nbytes(key)
        writers[key] = rank
    return writers


def _describe(tensor_type: tuple[tuple[int, ...], str]) -> str:
    return f"{tensor_type[1]} {list(tensor_type[0])}"
