"""Every layout of a world: sizes of the axes, micro-batches, stages of a rank, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, stages_by_rank
from mgpu_pipe.planning.activation_bytes import Activations
from mgpu_pipe.planning.layout_costs import passes_in_flight, waiting_passes
from mgpu_pipe.planning.memory_terms import Overheads, Place, State, host_bytes, memory_terms
from mgpu_pipe.planning.work import Work

CHECKPOINTING = ("none", "selective", "full")
MOST_ROWS = 64
"""Rows of the largest micro-batch that is tried."""
Array = NDArray[np.float64]
Rows = TypeVar("Rows", Work, Activations)


@dataclass(frozen=True)
class AllowedSizes:
    """Sizes of the axes that the model, the data and the objective allow."""

    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    """Of a ring."""
    ep: tuple[int, ...] = (1,)
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1),)
    """Pipeline schedules, each with stages of a rank."""
    checkpointing: tuple[str, ...] = CHECKPOINTING
    has_sequence_parallel: bool = False
    eager_kernels: float = 0.0
    """1 if blocks that cannot be compiled run eager kernels."""
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
    schedule: str = "1f1b"

    @property
    def name(self) -> str:
        """The layout in words, such as ``tp 8 x pp 4``."""
        axes = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")
        words = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        words += [self.context] if self.context != "ring" else []
        words += [self.schedule] if self.schedule not in ("1f1b", "interleaved_1f1b") else []
        words += [f"{self.stages_per_rank} stages a rank"] if SCHEDULES[self.schedule].more_stages else []
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
        if self.schedule != "1f1b":
            words.append(f"strategy.pipeline.schedule={self.schedule}")
        if SCHEDULES[self.schedule].more_stages:
            words.append(f"strategy.pipeline.stages_per_rank={self.stages_per_rank}")
        return words


def enumerate_layouts(model: Work, world: int, samples: int, allowed: AllowedSizes) -> Work:
    """Every layout of ``world`` processes that the sizes allow; fields of the layout are arrays of equal length.

    Args:
        model: see :func:`mgpu_pipe.planning.model_work.model_work`.
        samples: ``data.global_batch_size``.
    """
    rows = list(_fitting_layouts(model, world, samples, allowed))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 12).T
    tp, pp, cp, ep, dp_shard, dp_replicate, schedule, stages, micro, batches, mode, ulysses = columns
    full, selective = mode == CHECKPOINTING.index("full"), mode == CHECKPOINTING.index("selective")
    layouts = replace(
        model,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp_shard=dp_shard,
        dp_replicate=dp_replicate,
        schedule=schedule,
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
    eager = np.where(_has(layouts, "splits_backward"), allowed.eager_kernels, model.eager)
    return replace(layouts, eager=eager)


def data_parallel_layouts(layouts: Work, sharding: Sharding) -> Work:
    """Layouts of data parallelism alone under another sharding; a single process shards nothing, and can offload."""
    sharded = (np.asarray(layouts.dp_shard) > 1) | ((np.asarray(layouts.world) == 1) & (sharding.offload != "none"))
    alone = (layouts.tp * layouts.pp * layouts.cp * layouts.ep == 1) & sharded
    if sharding.zero:
        alone &= np.asarray(layouts.dp_replicate) == 1
    return _select(layouts, alone)


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
        schedule=tuple(SCHEDULES)[size("schedule")],
    )


def zero_bytes(layouts: Work, state: State, keeps: Activations, overheads: Overheads) -> Array:
    """Likely bytes of a rank of every layout of ZeRO; see :func:`layout_bytes`."""
    stores = _stores(layouts, keeps)
    groups = np.where(np.asarray(layouts.world) > 1, 2.0, 0.0)  # the world and the shards
    terms = memory_terms(layouts, replace(state, groups=groups), stores, Place(layouts.layers), overheads)
    return np.asarray(sum(terms.values()), dtype=np.float64)


def layout_host_bytes(layouts: Work, state: State) -> Array:
    """Bytes of a rank of every layout in host memory."""
    size = host_bytes(layouts, state, Place(layouts.layers))
    return np.broadcast_to(np.asarray(size, dtype=np.float64), np.shape(layouts.dp_shard))


def _stores(layouts: Work, keeps: Activations) -> Activations:
    again, products = np.asarray(layouts.recompute_elementwise), np.asarray(layouts.recompute_products)
    compiled = np.where(_has(layouts, "splits_backward"), 0.0, keeps.compiled)
    return replace(keeps, recompute=again, products=again - products, compiled=compiled)


def _has(layouts: Work, trait: str) -> NDArray[np.bool_]:
    """Whether each layout is a pipeline whose schedule has a trait of :class:`ScheduleTraits`."""
    chosen = [index for index, traits in enumerate(SCHEDULES.values()) if getattr(traits, trait)]
    return np.isin(layouts.schedule, chosen) & (np.asarray(layouts.pp) > 1)


def layout_bytes(layouts: Work, state: State, keeps: Activations, overheads: Overheads) -> Array:
    """Likely bytes of each layout's neediest pipeline rank; ``state`` and ``keeps`` are those of one process."""
    sizes = np.zeros(np.shape(layouts.pp))
    for same_cut, place in _places(layouts):
        chosen = _select(layouts, same_cut)
        size = _rank_bytes(chosen, state, _select(keeps, same_cut), overheads, place)
        sizes[same_cut] = np.maximum(sizes[same_cut], size)
    return sizes


def _rank_bytes(layouts: Work, state: State, keeps: Activations, overheads: Overheads, place: Place) -> Array:
    """Likely bytes of a pipeline rank at ``place`` of every layout."""
    pp, shards = np.asarray(layouts.pp), np.asarray(layouts.dp_shard * layouts.cp)
    whole = (pp > 1) | (shards == 1)
    axes = (layouts.tp, pp, layouts.cp, layouts.ep, layouts.dp_shard, layouts.dp_replicate, layouts.world)
    table, v_shaped = layouts.vocabulary * layouts.width, _has(layouts, "v_shaped")
    placed = replace(
        state,
        gathers_units=(~whole | ((pp == 1) & (np.asarray(state.gathers_units) > 0))).astype(np.float64),
        sums_whole=whole.astype(np.float64),
        gradient=np.where(whole, state.gradient, np.minimum(state.gradient, state.weight)),
        groups=sum((np.asarray(size) > 1).astype(np.float64) for size in axes),
        head=np.where((pp > 1) & ~v_shaped & (np.asarray(state.head) == 0), table, state.head),
    )
    terms = memory_terms(replace(layouts, zero=3.0), placed, _stores(layouts, keeps), place, overheads)
    return np.asarray(sum(terms.values()), dtype=np.float64)


def _select(layouts: Rows, chosen: NDArray[np.bool_]) -> Rows:
    """The layouts where ``chosen`` is true."""
    arrays = {field.name: getattr(layouts, field.name) for field in fields(layouts)}
    return replace(layouts, **{name: value[chosen] for name, value in arrays.items() if isinstance(value, np.ndarray)})


def _places(layouts: Work) -> Iterator[tuple[NDArray[np.bool_], Place]]:
    """Pipeline ranks that may need most, each with the layouts that have it and its place in them."""
    a_layer = layouts.attention_parameters + (layouts.chosen + layouts.shared) * layouts.expert_parameters
    a_layer = a_layer + layouts.context * layouts.heads * layouts.head_dim
    head = float(layouts.vocabulary * layouts.width / a_layer)
    cuts = np.stack([np.asarray(layouts.schedule), np.asarray(layouts.pp), np.asarray(layouts.stages_per_rank)])
    for schedule, pp, stages in np.unique(cuts, axis=1).T.astype(int).tolist():
        same_cut = np.all(cuts == np.array([[schedule], [pp], [stages]]), axis=0)
        name, micro_batches = tuple(SCHEDULES)[schedule], np.asarray(layouts.micro_batches)[same_cut]
        layers = _layers_of_stages(int(layouts.layers), pp * stages, head if pp > 1 else 0.0)
        ranks = []
        for rank, of_rank in enumerate(stages_by_rank(name, pp, stages)):
            in_flight = float(passes_in_flight(name, float(rank), pp, stages, 1e9))
            ends = (float(0 in of_rank), float(pp * stages - 1 in of_rank))
            waits = float(waiting_passes(name, float(rank), pp)) if pp > 1 else 0.0
            ranks.append((rank, (float(sum(layers[stage] for stage in of_rank)), in_flight, *ends, waits)))
        for rank, needs in ranks:
            if not any(_exceeds(other, needs) or (other == needs and at_rank < rank) for at_rank, other in ranks):
                passes = passes_in_flight(name, float(rank), pp, stages, micro_batches) if pp > 1 else 1.0
                yield same_cut, Place(needs[0], passes, needs[2], needs[3], needs[4])


def _exceeds(needs: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Whether a rank needs as much as another of everything, and more of something."""
    return needs != others and all(size >= least for size, least in zip(needs, others, strict=True))


def _layers_of_stages(layers: int, stages: int, head: float) -> list[int]:
    """Layers of every stage as ``stage_layers`` cuts equal ones; ``head`` costs that many layers."""
    if stages == 1:
        return [layers]

    def cost(last: int) -> tuple[float, float, int]:
        each, more = divmod(layers - last, stages - 1)
        squares = more * (each + 1) ** 2 + (stages - 1 - more) * each**2 + (last + head) ** 2
        return max(last + head, each + (more > 0)), squares, -last

    last = min(range(1, layers - stages + 2), key=cost)
    each, more = divmod(layers - last, stages - 1)
    return [*[each] * (stages - 1 - more), *[each + 1] * more, last]


def _fitting_layouts(model: Work, world: int, samples: int, allowed: AllowedSizes) -> Iterator[tuple[int, ...]]:
    modes, no_mode = [CHECKPOINTING.index(mode) for mode in allowed.checkpointing], [CHECKPOINTING.index("none")]
    numbers = {name: number for number, name in enumerate(SCHEDULES)}
    unused = (("1f1b", 1),)
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
                    axes = tp, pp, cp, ep, dp_shard, parallel // dp_shard
                    for schedule, stages in allowed.schedules if pp > 1 else unused:
                        if pp * stages > model.layers or not _takes(schedule, pp, batches):
                            continue
                        # A split backward pass computes a block again for each of its weights.
                        for mode in no_mode if SCHEDULES[schedule].splits_backward else modes:
                            yield *axes, numbers[schedule], stages, micro, batches, mode, ulysses


def _takes(schedule: str, pp: int, micro_batches: int) -> bool:
    """Whether a schedule takes so many micro-batches without longer waits than :func:`layout_costs.bubble` says."""
    traits = SCHEDULES[schedule]
    if traits.v_shaped:
        return micro_batches >= 2 * pp
    return not traits.more_stages or micro_batches % pp == 0


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]
