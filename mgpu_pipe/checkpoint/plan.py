"""Who writes what: a pure function of what every rank holds, so that all ranks come to the same plan by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_pipe.checkpoint.layout import KINDS, tensor_file_name
from mgpu_pipe.checkpoint.manifest import StoredTensor
from mgpu_pipe.checkpoint.tensor_file import ITEM_BYTES
from mgpu_pipe.checkpoint.tensor_slices import Box, tiling_fault
from mgpu_pipe.errors import CheckpointSaveError


@dataclass(frozen=True)
class Held:
    """A box that a rank holds, and what the rank says about its tensor."""

    kind: str
    box: Box
    global_shape: tuple[int, ...]
    dtype: str

    def to_json(self) -> list[object]:
        box = self.box
        return [self.kind, box.name, list(box.offsets), list(box.shape), list(self.global_shape), self.dtype]

    @classmethod
    def from_json(cls, value: Sequence[object]) -> Held:
        kind, name, offsets, shape, global_shape, dtype = value
        box = Box(str(name), tuple(offsets), tuple(shape))  # type: ignore[arg-type]
        return cls(str(kind), box, tuple(global_shape), str(dtype))  # type: ignore[arg-type]


def plan_files(held: Sequence[Sequence[Held]]) -> dict[str, dict[str, StoredTensor]]:
    """Assign every box to the file of exactly one of the ranks that hold it, balancing bytes.

    The largest boxes are dealt first, each to the least loaded of its holders (the lowest rank of equals).
    Empty boxes of a tensor that is not empty (a rank without a shard) are left out.

    Args:
        held: what each rank holds, in the order of ranks.

    Returns:
        ``[kind][name]``: the manifest's tensors.

    Raises:
        CheckpointSaveError: ranks disagree about a tensor's shape or dtype, a rank lists a box twice, or the boxes
            do not cover each tensor exactly once.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    facts: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for rank, boxes in enumerate(held):
        for item in boxes:
            fact = (item.global_shape, item.dtype)
            agreed = facts.setdefault((item.kind, item.box.name), fact)
            if agreed != fact:
                raise CheckpointSaveError(
                    f"{item.kind} tensor {item.box.name}: rank {rank} has {_describe(fact)}, "
                    f"another rank {_describe(agreed)}"
                )
            if item.box.volume == 0 and 0 not in item.global_shape:
                continue
            ranks = holders.setdefault((item.kind, item.box), [])
            if ranks and ranks[-1] == rank:  # ranks come in order
                raise CheckpointSaveError(f"{item.kind} tensor {item.box.name}: rank {rank} lists {item.box.key} twice")
            ranks.append(rank)
    writers = _deal(holders, {key: ITEM_BYTES[dtype] for key, (_, dtype) in facts.items()}, len(held))
    found: dict[tuple[str, str], list[tuple[Box, str]]] = {key: [] for key in facts}
    for (kind, box), rank in writers.items():
        found[kind, box.name].append((box, tensor_file_name(kind, rank)))
    tensors: dict[str, dict[str, StoredTensor]] = {kind: {} for kind in KINDS}
    for (kind, name), placed in sorted(found.items()):
        shape, dtype = facts[kind, name]
        fault = tiling_fault(shape, [box for box, _ in placed])
        if fault:
            raise CheckpointSaveError(f"{kind} tensor {name} of shape {list(shape)} is not held exactly once: {fault}")
        tensors[kind][name] = StoredTensor(shape, dtype, tuple(sorted(placed)))
    return tensors


def _deal(
    holders: dict[tuple[str, Box], list[int]], item_bytes: dict[tuple[str, str], int], world_size: int
) -> dict[tuple[str, Box], int]:
    def nbytes(key: tuple[str, Box]) -> int:
        return key[1].volume * item_bytes[key[0], key[1].name]

    load = [0] * world_size
    writers: dict[tuple[str, Box], int] = {}
    # Boxes with one holder come first: nothing can be chosen there, and the others are dealt around them.
    for key in sorted(holders, key=lambda k: (len(holders[k]) > 1, -nbytes(k), k)):
        rank = min(holders[key], key=lambda r: (load[r], r))
        load[rank] += nbytes(key)
        writers[key] = rank
    return writers


def _describe(fact: tuple[tuple[int, ...], str]) -> str:
    return f"{fact[1]} {list(fact[0])}"
