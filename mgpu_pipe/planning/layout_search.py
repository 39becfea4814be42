"""Every layout of a world: sizes of the axes, micro-batches, stages of a rank, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.planning.activation_bytes import Activations
from mgpu_pipe.planning.memory_terms import Overheads, Place, State, host_bytes, memory_terms, passes_in_flight
from mgpu_pipe.planning.work import Work

CHECKPOINTING = ("none", "selective", "full")
MOST_ROWS = 64
"""Rows of the largest micro-batch that is tried."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class AllowedSizes:
    """Sizes of the axes that the model, the data and the objective allow."""

    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    """Of a ring."""
    ep: tuple[int, ...] = (1,)
    stages_per_rank: tuple[int, ...] = (1,)
    checkpointing: tuple[str, ...] = CHECKPOINTING
    has_sequence_parallel: bool = False
    ulysses: frozenset[tuple[int, int]] = frozenset()
    """Sizes of ``tp`` and ``cp`` with which ranks may exchange heads for tokens."""


@dataclass(frozen=True)
class Sharding:
    """An engine that shards weights, gradients and optimizer state, and the place where they lie.

    Attributes:
        zero: DeepSpeed's stage; 0 is the mesh engine.
        offload: ``strategy.offload``.
    """

    zero: int = 0
    offload: str = "none"


@dataclass(frozen=True)
class Layout:
    """One layout, in whole numbers; names as in :class:`mgpu_pipe.config.group_keys.StrategyConfig`."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp_shard: int
    dp_replicate: int
    stages_per_rank: int
    micro_batch_size: int
    checkpointing: str
    sequence_parallel: bool
    context: str = "ring"
    sharding: Sharding = Sharding()

    @property
    def name(self) -> str:
        """The layout in words, such as ``tp 8 x pp 4``."""
        axes = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")
        words = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        words += [self.context] if self.context != "ring" else []
        words += [f"{self.stages_per_rank} stages a rank"] if self.stages_per_rank > 1 else []
        words += [f"ZeRO-{self.sharding.zero}"] if self.sharding.zero else []
        words += [f"offload {self.sharding.offload}"] if self.sharding.offload != "none" else []
        return " x ".join(words) or "one process"

    @property
    def overrides(self) -> list[str]:
        """Overrides that choose this layout, but for the number of processes."""
        offload = self.sharding.offload
        words = [*self._strategy(), *([f"strategy.offload={offload}"] if offload != "none" else [])]
        words = [*words, f"data.micro_batch_size={self.micro_batch_size}"]
        return [*words, f"strategy.activation_checkpointing={self.checkpointing}"]

    def _strategy(self) -> list[str]:
        if self.sharding.zero:
            return [f"strategy=zero{self.sharding.zero}"]
        axes = [f"strategy.{axis}={size}" for axis in ("tp", "pp", "cp", "ep") if (size := getattr(self, axis)) > 1]
        replicas = [f"strategy.dp_replicate={self.dp_replicate}"]
        if not axes:
            if self.dp_shard == 1:
                return ["strategy=ddp" if self.dp_replicate > 1 else "strategy=single"]
            return ["strategy=hsdp", *replicas] if self.dp_replicate > 1 else ["strategy=fsdp"]
        words = ["strategy=megatron", *axes, *(replicas if self.dp_replicate > 1 else [])]
        if self.sequence_parallel:
            words.append("strategy.sequence_parallel=true")
        if self.context != "ring":
            words.append(f"strategy.context.method={self.context}")
        if self.stages_per_rank > 1:
            words.append("strategy.pipeline.schedule=interleaved_1f1b")
            words.append(f"strategy.pipeline.stages_per_rank={self.stages_per_rank}")
        return words


def enumerate_layouts(model: Work, world: int, samples: int, allowed: AllowedSizes) -> Work:
    """Every layout of ``world`` processes that the sizes allow; fields of the layout are arrays of equal length.

    Args:
        model: see :func:`mgpu_pipe.planning.model_work.model_work`.
        samples: ``data.global_batch_size``.
    """
    rows = list(_layouts(model, world, samples, allowed))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 11).T
    tp, pp, cp, ep, dp_shard, dp_replicate, stages, micro, batches, mode, ulysses = columns
    full, selective = mode == CHECKPOINTING.index("full"), mode == CHECKPOINTING.index("selective")
    return replace(
        model,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp_shard=dp_shard,
        dp_replicate=dp_replicate,
        stages_per_rank=stages,
        ulysses=ulysses,
        rows=micro,
        micro_batches=batches,
        # a pipeline gathers weights and reduces gradients once a step
        zero=np.where(pp > 1, 1.0, 3.0),
        sequence_parallel=np.where((tp > 1) & allowed.has_sequence_parallel, 1.0, 0.0),
        recompute_products=full.astype(np.float64),
        recompute_attention=full.astype(np.float64),
        recompute_elementwise=(full | selective).astype(np.float64),
    )


def data_parallel_layouts(layouts: Work, sharding: Sharding) -> Work:
    """The layouts of data parallelism alone under another sharding; empty arrays if there are none.

    Args:
        layouts: see :func:`enumerate_layouts`.
    """
    alone = (layouts.tp * layouts.pp * layouts.cp * layouts.ep == 1) & (np.asarray(layouts.dp_shard) > 1)
    if sharding.zero:
        alone &= np.asarray(layouts.dp_replicate) == 1
    arrays = {field.name: getattr(layouts, field.name) for field in fields(layouts)}
    chosen = {name: value[alone] for name, value in arrays.items() if isinstance(value, np.ndarray)}
    return replace(layouts, **chosen)


def layout_at(layouts: Work, index: int, sharding: Sharding = Sharding()) -> Layout:
    """The layout of one row of :func:`enumerate_layouts` or :func:`data_parallel_layouts`."""

    def size(name: str) -> int:
        return int(getattr(layouts, name)[index])

    mode = "full" if size("recompute_products") else "selective" if size("recompute_elementwise") else "none"
    axes = {name: size(name) for name in ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "stages_per_rank")}
    sequence_parallel = bool(size("sequence_parallel"))
    context = "ulysses" if size("ulysses") else "ring"
    return Layout(
        **axes,
        micro_batch_size=size("rows"),
        checkpointing=mode,
        sequence_parallel=sequence_parallel,
        context=context,
        sharding=sharding,
    )


def zero_bytes(layouts: Work, state: State, keeps: Activations, overheads: Overheads) -> Array:
    """Likely bytes of a rank of every layout of ZeRO; see :func:`layout_bytes`."""
    stores = _stores(layouts, keeps)
    groups = 2.0  # the world and the shards
    terms = memory_terms(layouts, replace(state, groups=groups), stores, Place(layouts.layers), overheads)
    return np.asarray(sum(terms.values()), dtype=np.float64)


def layout_host_bytes(layouts: Work, state: State) -> Array:
    """Bytes of a rank of every layout in host memory."""
    size = host_bytes(layouts, state, Place(layouts.layers))
    return np.broadcast_to(np.asarray(size, dtype=np.float64), np.shape(layouts.dp_shard))


def _stores(layouts: Work, keeps: Activations) -> Activations:
    again, products = np.asarray(layouts.recompute_elementwise), np.asarray(layouts.recompute_products)
    return replace(keeps, recompute=again, products=again - products)


def layout_bytes(layouts: Work, state: State, keeps: Activations, overheads: Overheads) -> Array:
    """Likely bytes of the first or the last pipeline rank of every layout, the larger of them.

    Args:
        state: the model on one process; see :func:`mgpu_pipe.planning.memory.memory_by_rank`.
        keeps: likewise.
    """
    pp, shards = np.asarray(layouts.pp), np.asarray(layouts.dp_shard * layouts.cp)
    whole = (pp > 1) | (shards == 1)
    axes = (layouts.tp, pp, layouts.cp, layouts.ep, layouts.dp_shard, layouts.dp_replicate, layouts.world)
    table = layouts.vocabulary * layouts.width
    placed = replace(
        state,
        gathers_units=(~whole | ((pp == 1) & (np.asarray(state.gathers_units) > 0))).astype(np.float64),
        sums_whole=whole.astype(np.float64),
        gradient=np.where(whole, state.gradient, np.minimum(state.gradient, state.weight)),
        groups=sum((np.asarray(size) > 1).astype(np.float64) for size in axes),
        head=np.where((pp > 1) & (np.asarray(state.head) == 0), table, state.head),
    )
    stores = _stores(layouts, keeps)
    sharded, stages, batches = replace(layouts, zero=3.0), layouts.stages_per_rank, layouts.micro_batches
    schedules = [
        np.where(
            np.asarray(stages) > 1,
            passes_in_flight("interleaved_1f1b", rank, pp, stages, batches),
            passes_in_flight("1f1b", rank, pp, 1.0, batches),
        )
        for rank in (0.0, pp - 1)
    ]
    layers = layouts.layers / pp
    alone = (pp == 1).astype(np.float64)
    first = memory_terms(sharded, placed, stores, Place(layers, schedules[0], 1.0, alone), overheads)
    last = memory_terms(sharded, placed, stores, Place(layers, schedules[1], alone, 1.0), overheads)
    return np.maximum(*(np.asarray(sum(terms.values()), dtype=np.float64) for terms in (first, last)))


def _layouts(model: Work, world: int, samples: int, allowed: AllowedSizes) -> Iterator[tuple[int, ...]]:
    modes = [CHECKPOINTING.index(mode) for mode in allowed.checkpointing]
    splits = [(tp, cp, 0) for tp in allowed.tp for cp in allowed.cp]
    splits += [(tp, cp, 1) for tp, cp in sorted(allowed.ulysses) if tp in allowed.tp and cp > 1]
    for (tp, cp, ulysses), pp in ((split, pp) for split in splits for pp in allowed.pp):
        if world % (tp * pp * cp):
            continue
        parallel = world // (tp * pp * cp)
        if samples % parallel:
            continue
        share = samples // parallel
        for dp_shard in divisors(parallel):
            for ep in allowed.ep:
                if ep > 1 and (dp_shard * tp % ep or ep % tp):
                    continue
                for micro in divisors(share):
                    batches = share // micro
                    if micro > MOST_ROWS or batches < pp:
                        continue
                    for stages in allowed.stages_per_rank if pp > 1 else (1,):
                        if stages > 1 and (batches % pp or pp * stages > model.layers):
                            continue
                        for mode in modes:
                            yield tp, pp, cp, ep, dp_shard, parallel // dp_shard, stages, micro, batches, mode, ulysses


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]
