"""Keys whose ``auto`` or ``max`` the planner replaces by a value: the strategy, micro-batches, steps between saves."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from mgpu_pipe.checks.check_sizes import size_errors
from mgpu_pipe.checks.notices import Notice
from mgpu_pipe.checks.plan_layouts import plan_layouts
from mgpu_pipe.checks.start import is_joined
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.resolve import MICRO_BATCH, SAVES, devices_per_node, world_size
from mgpu_pipe.config.schema import DataConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.planning.goodput import Failures, best_interval, useful_share
from mgpu_pipe.planning.hardware_profile import GIB
from mgpu_pipe.planning.memory_limits import predict_fit
from mgpu_pipe.planning.run_hardware import CPU, predicted_seconds
from mgpu_pipe.topology import BatchPlan, ParallelDims

MAX = "max"
TRIED = 8
"""Number of fastest layouts to try; the plan takes the first that fits by the high figure of its memory too."""


def with_planned_strategy(config: RunConfig) -> tuple[RunConfig, list[Notice]]:
    """``config`` of ``strategy=auto`` with the planned strategy, and a notice; ConfigError if no layout fits."""
    trainer = replace(config.trainer, devices=devices_per_node(config.trainer, config.strategy))
    plan = replace(config.plan, gpus=[], rows=TRIED, rank_by="speed", hardware=config.plan.hardware[:1])
    try:
        plans, _ = plan_layouts(replace(config, trainer=trainer, plan=plan))
    except ConfigError as error:
        if error.key == "plan.hardware":
            raise
        fix = re.sub(r"plan\.gpus=(\d+)", lambda match: _processes(int(match[1]), trainer.devices), error.fix)
        fix = f"{fix}; or choose a strategy, such as strategy=fsdp"
        raise ConfigError("strategy", "auto", fix, error.reason) from None
    best = next((each for each in plans if not each.is_tight), plans[0])
    memory = best.memory.likely if best.profile.accelerator == CPU else best.memory.tensor_bytes  # as measured
    predicted = replace(config.plan, predicted_seconds=best.seconds, predicted_gib=memory / GIB)
    planned = replace(config, strategy=best.config.strategy, data=best.config.data, plan=predicted)
    text = (
        f"auto is {shlex.join(best.layout.overrides)}; predicted: {best.seconds:.3g} s a step and "
        f"{best.memory.likely / GIB:.3g} GiB a process on {best.profile.name}"
    )
    return planned, [Notice("strategy", text)]


def _processes(gpus: int, devices: int | str) -> str:
    """The override for so many GPUs on nodes of ``devices``."""
    fills_nodes = isinstance(devices, int) and gpus > devices and gpus % devices == 0
    return f"trainer.num_nodes={gpus // int(devices)}" if fills_nodes else f"trainer.devices={gpus}"


def with_predicted_micro_batch(
    config: RunConfig, resumed: RunConfig | None, elsewhere: bool
) -> tuple[RunConfig, Notice, bool]:
    """Replaces ``max`` in ``config`` by a number; returns a notice of it, and whether a launch measures it.

    Args:
        resumed: configuration of the run that continues, whose number stays where it can; None for a new run.
        elsewhere: nothing is started here; ``plan.hardware`` names the GPUs.

    Raises:
        ConfigError: the run is not of one command and machine, or no micro-batch is allowed.
    """
    sizes = micro_batch_sizes(config, elsewhere)
    if resumed is not None and resumed.data.micro_batch_size in sizes:
        same = with_micro_batch(config, int(resumed.data.micro_batch_size))
        return same, Notice(MICRO_BATCH, f"max stays {resumed.data.micro_batch_size}, which the run began with"), False
    if config.launch.type != "local" or config.trainer.num_nodes > 1 or is_joined():
        fix = "give a number, such as what max finds on one node"
        reason = "it is measured by a command that starts all processes of a run itself"
        raise ConfigError(MICRO_BATCH, MAX, fix, reason)
    fits = {size: predict_fit(with_micro_batch(config, size), elsewhere) for size in sizes}
    if fits[sizes[0]] is None:
        most = max(sizes[0], _auto(config.data, config.trainer, config.strategy))
        chosen, source = max(size for size in sizes if size <= most), "a first try"
    else:
        likely = [size for size, fit in fits.items() if fit is not None and fit.is_likely]
        chosen, source = max(likely, default=sizes[0]), "predicted"
    text = f"max is {chosen}, {source}; a run measures it as it starts"
    return with_micro_batch(config, chosen), Notice(MICRO_BATCH, text), True


def micro_batch_sizes(config: RunConfig, elsewhere: bool = False) -> list[int]:
    """Micro-batch sizes that samples and schedule allow, ascending; ConfigError of the smallest if none."""
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    share = BatchPlan.resolve(with_micro_batch(config, 1).data, dims.data_parallel_size, dims.pp).samples_per_process
    unchecked = replace(config, trainer=replace(config.trainer, memory_check="off"))
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    errors = {size: size_errors(with_micro_batch(unchecked, size), elsewhere) for size in divisors}
    sizes = [size for size in divisors if not errors[size]]
    if not sizes:
        raise errors[1][0]
    return sizes


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    """``config`` with another ``data.micro_batch_size``."""
    return replace(config, data=replace(config.data, micro_batch_size=size))


def _auto(data: DataConfig, trainer: TrainerConfig, strategy: StrategyConfig) -> int:
    dims = ParallelDims.from_config(trainer, strategy)
    data = replace(data, micro_batch_size="auto")
    return BatchPlan.resolve(data, dims.data_parallel_size, dims.pp).micro_batch_size


def plan_save_steps(config: RunConfig, resumed: RunConfig | None) -> tuple[int, Notice]:
    """Steps between saves instead of ``auto``, and a notice of them.

    Args:
        resumed: configuration of the run that continues, whose number stays; None for a new run.

    Raises:
        ConfigError: no ``plan.failure_hours``, or the step's time cannot be predicted.
    """
    if resumed is not None and isinstance(resumed.checkpoint.every_n_steps, int):
        steps = resumed.checkpoint.every_n_steps
        return steps, Notice(SAVES, f"auto stays {steps}, which the run began with")
    hours = config.plan.failure_hours
    if hours is None:
        fix = "give plan.failure_hours, the mean hours between failures of a GPU, or a number of steps"
        raise ConfigError(SAVES, "auto", fix, "how often it fails is not known")
    try:
        seconds, hardware = predicted_seconds(config)
    except ConfigError as error:
        if error.key != "model.type":
            raise
        fix = "give a number of steps, or checkpoint.every_n_minutes"
        raise ConfigError(SAVES, "auto", fix, f"the time of a step is not known: {error.reason}") from None
    gpus = world_size(config.trainer, config.strategy)
    failures = Failures.from_gpus(hours, gpus, config.plan.save_stall_s, config.plan.restart_s)
    steps = max(1, round(best_interval(failures) / seconds))
    share = useful_share(steps * seconds, failures)
    text = f"auto is {steps}: {seconds:.3g} s a step predicted on {hardware}, {share:.1%} of the time useful"
    return steps, Notice(SAVES, text)
