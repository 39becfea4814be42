"""Parallel sizes, their validation, each rank's coordinates, and the torch device mesh.

Only building a mesh imports torch. An *axis* is a dimension of the mesh; a *dim* is a dimension
of a tensor. Mesh order, outermost first: pp, dp_replicate, dp_shard, cp, tp, so that tensor parallelism, which
communicates most, stays inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import DataConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPREAD = {
    "pp": (0,),
    "dp_replicate": (1,),
    "dp_shard": (2, 3),
    "cp": (4,),
    "tp": (5,),
    "dp_shard_cp": (2, 3, 4),
    "stage": (1, 2, 3, 4, 5),
    "replica": (2, 3, 4, 5),
    "ep": (3, 5),
    "expert_shard": (2, 4),
}
"""Indices of the sizes of :class:`Meshes` in which the ranks of a group differ, by group name. The sizes are pp,
dp_replicate, the data-parallel shards between expert groups and those inside one, cp, tp."""
MAX_AUTO_MICRO_BATCH = 8


@dataclass(frozen=True)
class ParallelDims:
    """The validated sizes of every parallel axis."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def resolve(cls, strategy: StrategyConfig, world_size: int) -> ParallelDims:
        """Sizes of ``strategy`` in a world of ``world_size`` processes, with the one ``auto`` size filled in.

        Raises:
            ConfigError: a size below 1, two ``auto`` sizes, a product other than the world, or an ``ep`` that
                does not divide ``dp_shard * tp`` or is no multiple of ``tp``.
        """
        sizes: dict[str, int] = {}
        auto: list[str] = []
        for axis in AXES:
            size = getattr(strategy, axis)
            if size == "auto":
                auto.append(axis)
            elif size < 1:
                raise ConfigError(f"strategy.{axis}", size, "use a size of at least 1, or auto")
            else:
                sizes[axis] = size
        if len(auto) > 1:
            raise ConfigError(f"strategy.{auto[1]}", "auto", f"give a number: strategy.{auto[0]} is auto already")
        product = prod(sizes.values())
        named = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "1"
        if auto:
            if world_size % product:
                fix = f"use a multiple of {product}, for strategy.{auto[0]}=auto fills what remains of {named}"
                reason = f"{world_size} processes are not divisible by {named}"
                raise ConfigError("trainer.devices", world_size, fix, reason)
            sizes[auto[0]] = world_size // product
        elif product != world_size:
            fix = f"use {product} processes or set one size of the strategy to auto"
            reason = f"strategy={strategy.name} makes a world of {named} = {product}"
            raise ConfigError("trainer.devices", world_size, fix, reason)
        ep = cls._resolve_ep(strategy, sizes)
        return cls(**sizes, ep=ep)

    @classmethod
    def from_config(cls, trainer: TrainerConfig, strategy: StrategyConfig) -> ParallelDims:
        """Sizes of ``strategy`` in the world that ``trainer`` starts; raises as :meth:`resolve`."""
        return cls.resolve(strategy, world_size(trainer, strategy))

    @staticmethod
    def _resolve_ep(strategy: StrategyConfig, sizes: dict[str, int]) -> int:
        span = sizes["dp_shard"] * sizes["tp"]
        ep = span if strategy.ep == "auto" else strategy.ep
        if ep != 1 and (ep < 1 or span % ep or ep % sizes["tp"]):
            fits = [n for n in range(1, span + 1) if span % n == 0 and n % sizes["tp"] == 0]
            reason = f"ep re-cuts dp_shard * tp = {span} and must be a multiple of tp = {sizes['tp']}"
            raise ConfigError("strategy.ep", strategy.ep, f"use one of {fits}", reason)
        return ep

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel_size(self) -> int:
        """Processes that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def cuts_the_model(self) -> bool:
        """Whether a rank holds only a part of the weights."""
        return self.world_size > self.dp_replicate

    @property
    def uses_model_axes(self) -> bool:
        """Whether there is more than data parallelism: an axis on which ranks work on the same samples, or ep."""
        return self.pp * self.cp * self.tp * self.ep > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` on every axis."""
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            size = getattr(self, axis)
            position[axis] = rank % size
            rank //= size
        return {axis: position[axis] for axis in AXES}

    def data_parallel_rank(self, rank: int) -> int:
        """Index of the share of every step's samples that ``rank`` takes."""
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def randomness_rank(self, rank: int) -> int:
        """Number of the rank among those whose dropout differs; tensor-parallel ranks share activations and the number.

        Within data parallelism it is the data-parallel rank, whatever the other sizes.
        """
        coordinates = self.coordinates(rank)
        return self.data_parallel_rank(rank) + self.data_parallel_size * (
            coordinates["cp"] + self.cp * coordinates["pp"]
        )

    def own_randomness_rank(self, rank: int) -> int:
        """Number of the rank for activations that tensor-parallel ranks split; follows :meth:`randomness_rank`'s."""
        number = self.world_size // self.tp
        return self.randomness_rank(rank) + number * (1 + self.coordinates(rank)["tp"])

    def describe(self) -> str:
        """The sizes that matter, e.g. ``dp_replicate=4``; ``one process`` where all are 1."""
        sizes = [f"{axis}={getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) > 1]
        return " x ".join(sizes) or "one process"

    def as_dict(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in (*AXES, "ep")}


class Meshes:
    """Process groups and device meshes of ranks that differ in some axes alone; the same ranks have one group.

    A group is created on first use, because each costs GPU memory. All ranks of the world use the world group, and a
    single rank, which sends nothing, a gloo group. Every call is collective: all ranks request the same groups in the
    same order.

    Besides :data:`AXES` there are ``dp_shard_cp``, over which FSDP2 shards, for context-parallel ranks hold the same
    parameters; ``stage``, all ranks of a pipeline stage; ``replica``, those that hold one copy of a stage between them;
    and ``ep``, which re-cuts dp_shard * tp: its ranks hold different experts and see, together, the tokens of one
    context-parallel rank of each of their data-parallel shards; ``expert_shard``, those that hold the same experts.
    """

    def __init__(self, dims: ParallelDims, device_type: str) -> None:
        self._device_type = device_type
        inner = max(1, dims.ep // dims.tp)  # data-parallel shards in an expert group
        self._sizes = (dims.pp, dims.dp_replicate, dims.dp_shard // inner, inner, dims.cp, dims.tp)
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def group(self, axis: str) -> ProcessGroup:
        """The ranks that differ from this one along ``axis`` alone."""
        spread = tuple(dim for dim in SPREAD[axis] if self._sizes[dim] > 1)
        if spread not in self._groups:
            self._groups[spread] = self._create(spread, axis)
        return self._groups[spread]

    def mesh(self, *axes: str) -> DeviceMesh:
        """The device mesh over ``axes``, the outermost first."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        groups = [self.group(axis) for axis in axes]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self._device_type, mesh_dim_names=axes)
        spread = tuple(dim for axis in axes for dim in SPREAD[axis])
        (ranks,) = [ranks for ranks in self._ranks(spread) if dist.get_rank() in ranks]
        shape = tuple(group.size() for group in groups)
        return DeviceMesh.from_group(groups, self._device_type, ranks.reshape(shape), mesh_dim_names=axes)

    def data_mesh(self, shard: str = "dp_shard_cp") -> DeviceMesh:
        """The axes over which this rank's parameters are replicated or sharded by FSDP2.

        One axis of shards alone where there is one replica, so that nothing is reduced over an axis of size 1.

        Args:
            shard: ``expert_shard`` for the experts of expert parallelism.
        """
        return self.mesh(shard) if self._sizes[1] == 1 else self.mesh("dp_replicate", shard)

    def _ranks(self, spread: tuple[int, ...]) -> Tensor:
        """(groups, ranks of each): those that differ in the sizes at ``spread`` alone."""
        import torch

        fixed = [dim for dim in range(len(self._sizes)) if dim not in spread]
        ranks = torch.arange(prod(self._sizes)).reshape(self._sizes).permute(*fixed, *spread)
        return ranks.reshape(-1, prod(self._sizes[dim] for dim in spread))

    def _create(self, spread: tuple[int, ...], name: str) -> ProcessGroup:
        import torch.distributed as dist

        ranks, rank = self._ranks(spread), dist.get_rank()
        if len(ranks) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if not spread:
            groups = [dist.new_group([rank], backend="gloo", use_local_synchronization=True)]
        elif dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
            groups = [dist.split_group(split_ranks=ranks.tolist(), group_desc=name)]
        else:
            groups = [dist.new_group(group, group_desc=name) for group in ranks.tolist()]
        (mine,) = [group for group in groups if isinstance(group, dist.ProcessGroup)]
        return mine


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's samples are cut over processes and forward passes."""

    global_batch_size: int
    data_parallel_size: int
    micro_batch_size: int

    @property
    def samples_per_process(self) -> int:
        return self.global_batch_size // self.data_parallel_size

    @property
    def num_micro_batches(self) -> int:
        return self.samples_per_process // self.micro_batch_size

    @classmethod
    def resolve(cls, data: DataConfig, data_parallel_size: int, stages: int = 1) -> BatchPlan:
        """Derive the number of micro-batches.

        Args:
            stages: ranks of the pipeline. ``auto`` keeps them busy with two micro-batches each, where it can.

        Raises:
            ConfigError: sizes that do not divide, with the nearest ones that do.
        """
        total = data.global_batch_size
        if total < 1:
            raise ConfigError("data.global_batch_size", total, "use at least 1")
        if total % data_parallel_size:
            below = total // data_parallel_size * data_parallel_size
            nearest = " or ".join(str(n) for n in (below, below + data_parallel_size) if n > 0)
            reason = f"not divisible by the {data_parallel_size} data-parallel processes"
            raise ConfigError("data.global_batch_size", total, f"use {nearest}", reason)
        share = total // data_parallel_size
        divisors = [n for n in range(1, share + 1) if share % n == 0]
        if isinstance(data.micro_batch_size, str):  # the start replaces max by a number
            small = [n for n in divisors if n <= MAX_AUTO_MICRO_BATCH]
            for count in (2 * stages, stages) if stages > 1 else ():
                fits = [n for n in small if share // n >= count and (share // n) % stages == 0]
                if fits:
                    return cls(total, data_parallel_size, max(fits))
            return cls(total, data_parallel_size, max(small))
        micro = data.micro_batch_size
        if micro not in divisors:
            nearest_divisors = sorted(sorted(divisors, key=lambda n: abs(n - micro))[:2])
            raise ConfigError(
                "data.micro_batch_size",
                micro,
                f"use {' or '.join(map(str, nearest_divisors))}",
                f"does not divide a process's share of {share} samples "
                f"(data.global_batch_size={total} over {data_parallel_size})",
            )
        return cls(total, data_parallel_size, micro)
