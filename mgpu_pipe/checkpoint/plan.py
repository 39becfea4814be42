"""Who writes what: a pure function of what every rank holds, so that every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_pipe.checkpoint.layout import KINDS, tensor_file_name
from mgpu_pipe.checkpoint.manifest import StoredTensor
from mgpu_pipe.checkpoint.tensor_file import ITEM_BYTES
from mgpu_pipe.checkpoint.tensor_slices import TensorSlice, tiling_fault
from mgpu_pipe.errors import CheckpointSaveError


@dataclass(frozen=True)
class Held:
    """A tensor slice that a rank holds, and what the rank says about its tensor."""

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
    def from_json(cls, value: Sequence[object]) -> Held:
        kind, name, offsets, shape, global_shape, dtype = value
        tensor_slice = TensorSlice(str(name), tuple(offsets), tuple(shape))  # type: ignore[arg-type]
        return cls(str(kind), tensor_slice, tuple(global_shape), str(dtype))  # type: ignore[arg-type]


def plan_files(by_rank: Sequence[Sequence[Held]]) -> dict[str, dict[str, StoredTensor]]:
    """Assign every tensor slice to the file of exactly one of the ranks that hold it, balancing bytes.

    The largest tensor slices are dealt first, each to the least loaded of its holders (the lowest rank of equals).
    Empty tensor slices of a tensor that is not empty (a rank without a shard) are left out.

    Args:
        by_rank: what each rank holds, in the order of ranks.

    Returns:
        ``[kind][name]``: the manifest's tensors.

    Raises:
        CheckpointSaveError: ranks disagree about a tensor's shape or dtype, a rank lists a tensor slice twice, or the
            tensor slices do not cover each tensor exactly once.
    """
    holders: dict[tuple[str, TensorSlice], list[int]] = {}
    facts: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for rank, tensor_slices in enumerate(by_rank):
        for item in tensor_slices:
            fact = (item.global_shape, item.dtype)
            agreed = facts.setdefault((item.kind, item.tensor_slice.name), fact)
            if agreed != fact:
                raise CheckpointSaveError(
                    f"{item.kind} tensor {item.tensor_slice.name}: rank {rank} has {_describe(fact)}, "
                    f"another rank {_describe(agreed)}"
                )
            if item.tensor_slice.volume == 0 and 0 not in item.global_shape:
                continue
            ranks = holders.setdefault((item.kind, item.tensor_slice), [])
            if ranks and ranks[-1] == rank:  # ranks come in order
                raise CheckpointSaveError(
                    f"{item.kind} tensor {item.tensor_slice.name}: rank {rank} lists {item.tensor_slice.key} twice"
                )
            ranks.append(rank)
    writers = _deal(holders, {key: ITEM_BYTES[dtype] for key, (_, dtype) in facts.items()}, len(by_rank))
    tiles: dict[tuple[str, str], list[tuple[TensorSlice, str]]] = {key: [] for key in facts}
    for (kind, tensor_slice), rank in writers.items():
        tiles[kind, tensor_slice.name].append((tensor_slice, tensor_file_name(kind, rank)))
    tensors: dict[str, dict[str, StoredTensor]] = {kind: {} for kind in KINDS}
    for (kind, name), placed in sorted(tiles.items()):
        shape, dtype = facts[kind, name]
        fault = tiling_fault(shape, [tensor_slice for tensor_slice, _ in placed])
        if fault:
            raise CheckpointSaveError(f"{kind} tensor {name} of shape {list(shape)} is not held exactly once: {fault}")
        tensors[kind][name] = StoredTensor(shape, dtype, tuple(sorted(placed)))
    return tensors


def _deal(
    holders: dict[tuple[str, TensorSlice], list[int]], item_bytes: dict[tuple[str, str], int], world_size: int
) -> dict[tuple[str, TensorSlice], int]:
    def nbytes(key: tuple[str, TensorSlice]) -> int:
        return key[1].volume * item_bytes[key[0], key[1].name]

    load = [0] * world_size
    writers: dict[tuple[str, TensorSlice], int] = {}
    # Tensor slices with one holder come first: nothing can be chosen there, and the others are dealt around them.
    for key in sorted(holders, key=lambda k: (len(holders[k]) > 1, -nbytes(k), k)):
        rank = min(holders[key], key=lambda r: (load[r], r))
        load[rank] += nbytes(key)
        writers[key] = rank
    return writers


def _describe(fact: tuple[tuple[int, ...], str]) -> str:
    return f"{fact[1]} {list(fact[0])}"
