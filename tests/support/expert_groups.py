"""Who shares experts with whom, by arithmetic: expert parallelism re-cuts ``dp_shard * tp``.

An expert-parallel group is ``ep / tp`` consecutive data-parallel ranks with all of their tensor-parallel ranks, so it
lies as close together as the mesh order allows. Ranks of different context-parallel position are in different groups.
"""

from __future__ import annotations

from mgpu_pipe.topology import ParallelDims

EXPERT_AXES = ("pp", "dp_replicate", "expert_shard", "cp", "ep")
"""The world as the experts see it; ``expert_shard`` is ``dp_shard * tp / ep``."""


def expert_groups(dims: ParallelDims, rank: int) -> tuple[list[int], list[int]]:
    """The ranks of ``rank``'s expert-parallel group, and its expert-data group, each in their order.

    A rank's position in the first says which experts it holds. The second are the ranks of its pipeline stage that
    hold the same experts: their gradients are to be summed, by FSDP2 or an all-reduce.

    Raises:
        ValueError: ``dims.ep`` is no multiple of ``dims.tp`` that divides ``dp_shard * tp``.
    """
    own = _coordinates(dims, rank)
    everywhere = {other: _coordinates(dims, other) for other in range(dims.world_size)}
    same = [other for other, at in everywhere.items() if at[:4] == own[:4]]
    holders = [other for other, at in everywhere.items() if (at[0], at[4]) == (own[0], own[4])]
    return sorted(same, key=lambda other: everywhere[other][4]), holders


def _data_ranks(dims: ParallelDims) -> int:
    """How many data-parallel ranks an expert-parallel group spans."""
    if dims.ep % dims.tp or dims.dp_shard % (dims.ep // dims.tp):
        raise ValueError(f"ep={dims.ep} does not re-cut dp_shard={dims.dp_shard} times tp={dims.tp}")
    return dims.ep // dims.tp


def _coordinates(dims: ParallelDims, rank: int) -> tuple[int, int, int, int, int]:
    """The position of ``rank`` on each of :data:`EXPERT_AXES`."""
    at = dims.coordinates(rank)
    inside = _data_ranks(dims)
    position = at["dp_shard"] % inside * dims.tp + at["tp"]
    return at["pp"], at["dp_replicate"], at["dp_shard"] // inside, at["cp"], position
