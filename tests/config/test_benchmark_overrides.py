"""The command lines that benchmarks start compose, so that a change of ``conf/`` that breaks one is seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.accuracy import plan_cpu, plan_memory
from benchmarks.commands import runs_listing, startup
from benchmarks.gpu import gpu_step
from benchmarks.robustness import disturbances
from benchmarks.speed import thread_waits
from mgpu_pipe.config.hydra.compose import compose

COMMANDS: dict[str, Sequence[str]] = {
    "startup": startup.TRAIN,
    "startup, user's keys": startup.USER_KEYS,
    "runs_listing": runs_listing.TRAIN,
    "thread_waits": thread_waits.OVERRIDES,
    "disturbances": disturbances.COMMAND,
    "plan_cpu": (*plan_cpu.MODEL, *plan_cpu.QUIET),
    "plan_memory": plan_memory.SHAPE,
    **{name: (*gpu_step.BASE, *overrides) for name, overrides in gpu_step.OURS.items()},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_overrides_of_a_benchmark_compose(command: str) -> None:
    compose(list(COMMANDS[command]))
