"""How many threads a worker computes with, and how they wait for one another. No torch.

The number follows from what this process may use, never from how busy the machine is: the same command computes the
same bits on a busy machine and on a quiet one. What a busy machine needs is that threads do not wait by spinning.
A thread of a parallel loop whose siblings have no core burns the core that they wait for; measured by
``benchmarks/thread_waits.py``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgpu_pipe.config.hardware import cpu_cores

if TYPE_CHECKING:
    from mgpu_pipe.config.schema import RunConfig

SPIN_COUNT = 1000
"""Turns of a waiting loop before a thread of libgomp sleeps: what libgomp itself takes once its threads outnumber the
cores. Its default of 300,000 knows nothing of other processes; sleeping at once costs time on free cores."""
SPIN_VARIABLE = "GOMP_SPINCOUNT"
WAITING_VARIABLES = (SPIN_VARIABLE, "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class Threads:
    """Compute threads of a worker, and why as many."""

    per_worker: int
    rule: str


def choose_threads(config: RunConfig, workers: int) -> Threads:
    """``launch.threads_per_worker``, or the usable cores divided by the ``workers`` on this machine, at least one."""
    asked = config.launch.threads_per_worker
    if asked != "auto":
        return Threads(asked, "launch.threads_per_worker")
    cores = cpu_cores()
    return Threads(max(1, cores // workers), f"usable cores / workers on this machine: {cores} / {workers}, at least 1")


def limit_threads(environment: MutableMapping[str, str]) -> None:
    """Let this process and its children compute on usable cores only, in threads that sleep soon where they wait.

    Must come before torch is imported, whose OpenMP reads these variables as it is loaded. What the user set stands.
    """
    environment.setdefault("OMP_NUM_THREADS", str(cpu_cores()))
    if not any(name in environment for name in WAITING_VARIABLES):
        environment[SPIN_VARIABLE] = str(SPIN_COUNT)
