"""``checkpoint.every_n_steps=auto``: the steps between saves with the largest share of useful time."""

from __future__ import annotations

from dataclasses import replace

from mgpu_pipe.checks.notices import Notice
from mgpu_pipe.checks.run_hardware import predicted_seconds
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.planning.goodput import Failures, best_interval, useful_share

KEY = "checkpoint.every_n_steps"


def with_planned_saves(config: RunConfig, resumed: RunConfig | None) -> tuple[RunConfig, list[Notice]]:
    """Replaces ``auto`` in ``config`` by a number of steps; the notice names it.

    Args:
        resumed: configuration of the run that continues, whose number stays; None for a new run.

    Raises:
        ConfigError: no ``plan.failure_hours``, or the step's time cannot be predicted.
    """
    if resumed is not None and isinstance(resumed.checkpoint.every_n_steps, int):
        steps = resumed.checkpoint.every_n_steps
        return _with_steps(config, steps), [Notice(KEY, f"auto stays {steps}, which the run began with")]
    hours = config.plan.failure_hours
    if hours is None:
        fix = "give plan.failure_hours, the mean hours between failures of a GPU, or a number of steps"
        raise ConfigError(KEY, "auto", fix, "how often it fails is not known")
    try:
        seconds, hardware = predicted_seconds(config)
    except ConfigError as error:
        if error.key != "model.type":
            raise
        fix = "give a number of steps, or checkpoint.every_n_minutes"
        raise ConfigError(KEY, "auto", fix, f"the time of a step is not known: {error.reason}") from None
    gpus = world_size(config.trainer, config.strategy)
    failures = Failures.of_gpus(hours, gpus, config.plan.save_stall_s, config.plan.restart_s)
    steps = max(1, round(best_interval(failures) / seconds))
    share = useful_share(steps * seconds, failures)
    text = f"auto is {steps}: {seconds:.3g} s a step predicted on {hardware}, {share:.1%} of the time useful"
    return _with_steps(config, steps), [Notice(KEY, text)]


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, checkpoint=replace(config.checkpoint, every_n_steps=steps))
