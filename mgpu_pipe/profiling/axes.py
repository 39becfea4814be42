"""The name of a process group under which the configuration knows it."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.topology import AXES, ParallelDims

EVERYONE = "all ranks"
ALL_TO_ALL = "all-to-all"
EXPERTS = {"ep": "ep", "expert_shard": "dp_shard"}
"""Groups of experts, as :class:`~mgpu_pipe.topology.Meshes` describes them."""


def axis_of(dims: ParallelDims, ranks: Sequence[int], described: str = "", kind: str = "") -> str:
    """The axes along which ``ranks`` differ; :data:`EVERYONE` for a world of several axes.

    Args:
        described: torch's description of the group. An expert group has the ranks of other axes.
        kind: of the collective. What goes from each to each along other axes than ``cp`` is experts' tokens, also in a
            group that other axes share with theirs.
    """
    if described in EXPERTS and dims.ep > 1:
        return EXPERTS[described]
    positions = [dims.coordinates(rank) for rank in ranks]
    apart = [axis for axis in AXES if len({position[axis] for position in positions}) > 1]
    if kind == ALL_TO_ALL and dims.ep > 1 and "cp" not in apart:
        return "ep"
    if len(apart) > 1 and len(ranks) == dims.world_size:
        return EVERYONE
    return " x ".join(apart) or EVERYONE
