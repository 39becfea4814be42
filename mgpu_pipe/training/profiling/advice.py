"""Advice from a step's time: the slow rank, and the key that would help."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.schema import DataConfig, ObjectiveConfig
from mgpu_pipe.data.samples import describe_imbalance
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.profiling.device_trace import DATA, HOST
from mgpu_pipe.training.profiling.link_table import EVERYONE
from mgpu_pipe.training.profiling.rank_times import RankTimes, StepTimes, slowest

MOST_COMMUNICATION = 0.2
MOST_DATA = MOST_HOST = 0.1
"""Shares of a step above which the user gets advice."""
MORE_EVEN = 0.05
"""Gain in balance above which ``data.balance=cost`` is advised, as a share of the processes' mean."""


def findings(
    times: StepTimes,
    strategy: StrategyConfig,
    data: DataConfig,
    objective: ObjectiveConfig,
    dims: ParallelDims,
    plan: BatchPlan,
    uneven: tuple[float, float] | None = None,
) -> list[str]:
    """A sentence for each finding, the most important first; ``uneven``: :func:`mgpu_pipe.data.samples.imbalances`."""
    waiting, transfer = times.share("waiting"), times.share("transfer")
    lines = []
    if dims.world_size > 1:
        lines.append(
            f"communication that nothing hides takes {waiting + transfer:.0%} of a step: {waiting:.0%} waiting for "
            f"another rank, {transfer:.0%} transfer"
        )
    slow = slowest(times.ranks)
    if slow is not None:
        lines.append(f"{_straggler(times.ranks, *slow)}; {_fix_for(slow[1], data, dims)}")
    elif times.share(HOST) > MOST_HOST:
        lines.append(_host(times))
    if waiting + transfer > MOST_COMMUNICATION:
        warning = f"more than {MOST_COMMUNICATION:.0%} of a step is communication"
        axis = times.axes[0]
        key = _key(axis, strategy, dims, plan)
        if slow is not None and waiting > transfer:
            lines.append(f"warning: {warning}, most of it waiting: help rank {slow[0]} first")
        else:
            lines.append(f"warning: {warning}, most of it along {axis}{f'; try {key}' if key else ''}")
    if times.share(DATA) > MOST_DATA:
        more = max(2 * data.num_workers, 1)
        lines.append(f"warning: {times.share(DATA):.0%} of a step is waiting for data; try data.num_workers={more}")
    if uneven is not None:
        lines.append(_balance(*uneven, data.balance == "cost", describe_imbalance(objective, plan)))
    return lines


def _balance(as_they_come: float, by_cost: float, is_by_cost: bool, what: str) -> str:
    said = f"{what}: {as_they_come:.2f}"
    if is_by_cost:
        return f"{said} as the samples come, {by_cost:.2f} as data.balance=cost deals them"
    return f"{said}, {by_cost:.2f} with data.balance=cost{'; try it' if as_they_come - by_cost > MORE_EVEN else ''}"


def _straggler(ranks: Sequence[RankTimes], rank: int, phase: str, late: float) -> str:
    times = ranks[rank]
    where = (
        f"in callback {times.callback} ({times.callback_s * 1000:.0f} ms)"
        if _is_callback(ranks, rank, phase)
        else phase
    )
    return (
        f"rank {rank} on node {times.node} is the slowest: it works {times.own_s * 1000:.0f} ms a step by itself, "
        f"{late * 1000:.0f} ms more than the others, most of that {where}"
    )


def _host(times: StepTimes) -> str:
    rank = max(range(len(times.ranks)), key=lambda number: times.ranks[number].own.get(HOST, 0.0))
    busiest = times.ranks[rank]
    most = f", most of that in callback {busiest.callback} ({busiest.callback_s * 1000:.0f} ms)"
    named = most if _is_callback(times.ranks, rank, HOST) else ""
    return f"warning: {times.share(HOST):.0%} of a step is neither compute nor communication{named}"


def _fix_for(phase: str, data: DataConfig, dims: ParallelDims) -> str:
    if phase == DATA:
        return f"try data.num_workers={max(2 * data.num_workers, 1)}"
    if phase == HOST:
        return "check what else its process does"
    if dims.pp > 1:
        return "give its stage fewer layers: strategy.pipeline.layers"
    return "look at its node: other programs there, its clock, its device"


def _is_callback(ranks: Sequence[RankTimes], rank: int, phase: str) -> bool:
    return phase == HOST and ranks[rank].callback_s > 0.5 * ranks[rank].own[HOST]


def _key(axis: str, strategy: StrategyConfig, dims: ParallelDims, plan: BatchPlan) -> str:
    """The setting that would reduce communication along ``axis``, and why; empty where none is known."""
    first = axis.partition(" ")[0]
    if axis == EVERYONE or first not in KEYS:
        return ""
    return KEYS[first](strategy, dims, plan)


def _replicate(strategy: StrategyConfig, dims: ParallelDims, plan: BatchPlan) -> str:
    size = 2 * plan.global_batch_size
    return f"data.global_batch_size={size}, another batch: gradients are summed once a step, whatever its size"


def _shard(strategy: StrategyConfig, dims: ParallelDims, plan: BatchPlan) -> str:
    if strategy.engine == "deepspeed":
        stage = strategy.deepspeed.stage
        return f"strategy=zero{stage - 1}, where its state fits: it gathers less" if stage > 1 else ""
    if plan.num_micro_batches > 1:
        larger = next(
            n
            for n in range(plan.micro_batch_size + 1, plan.samples_per_process + 1)
            if plan.samples_per_process % n == 0
        )
        return f"data.micro_batch_size={larger}: weights are gathered {plan.num_micro_batches} times a step now"
    if strategy.fsdp.reshard_after_forward is not False:
        return "strategy.fsdp.reshard_after_forward=false: gathered weights stay until the backward pass has used them"
    return "strategy=ddp, where weights, gradients and optimizer state fit in each process: it gathers no weights"


def _tensor(strategy: StrategyConfig, dims: ParallelDims, plan: BatchPlan) -> str:
    return f"strategy.tp={dims.tp // 2}: a layer sums activations four times, so tp is for what does not fit otherwise"


def _pipeline(strategy: StrategyConfig, dims: ParallelDims, plan: BatchPlan) -> str:
    if plan.micro_batch_size > 1:
        size = next(n for n in range(plan.micro_batch_size - 1, 0, -1) if plan.samples_per_process % n == 0)
        return f"data.micro_batch_size={size}: more micro-batches leave stages idle for less of a step"
    if strategy.pipeline.schedule in ("gpipe", "1f1b"):
        return "strategy.pipeline.schedule=zbv: it fills the time in which stages are idle"
    return f"strategy.pp={dims.pp // 2}"


def _context(strategy: StrategyConfig, dims: ParallelDims, plan: BatchPlan) -> str:
    other = "ulysses" if strategy.context.method == "ring" else "ring"
    return f"strategy.context.method={other}, or strategy.cp={dims.cp // 2}"


def _expert(strategy: StrategyConfig, dims: ParallelDims, plan: BatchPlan) -> str:
    return f"strategy.ep={dims.ep // 2}: tokens then travel among fewer ranks"


KEYS = {"dp_replicate": _replicate, "dp_shard": _shard, "tp": _tensor, "pp": _pipeline, "cp": _context, "ep": _expert}
