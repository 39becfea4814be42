"""Number of compute threads of a worker, and how they wait for each other.

The number depends on the cores that this process may use, never on the load: the same command computes the same bits
on a busy and an idle machine. On a busy machine threads must not wait by spinning: a spinning thread occupies the core
that its siblings need; measured by ``benchmarks/speed/thread_waits.py``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

from mgpu_pipe.system.hardware import cpu_cores

SPIN_COUNT = 1000
"""Spins of a waiting libgomp thread before it sleeps: libgomp's value if its threads outnumber the cores. Its default
of 300,000 ignores other processes; sleeping at once costs time on free cores."""
SPIN_VARIABLE = "GOMP_SPINCOUNT"
WAITING_VARIABLES = (SPIN_VARIABLE, "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class Threads:
    """Compute threads of a worker, and the rule that gave their number."""

    per_worker: int
    rule: str


def choose_threads(configured: int | Literal["auto"], workers: int) -> Threads:
    """The configured number of threads, or this machine's usable cores divided by its workers, at least 1."""
    if configured != "auto":
        return Threads(configured, "launch.threads_per_worker")
    cores = cpu_cores()
    return Threads(max(1, cores // workers), f"usable cores / workers on this machine: {cores} / {workers}, at least 1")


def limit_threads(environment: MutableMapping[str, str]) -> None:
    """Limit threads of this process and its children to usable cores, and let waiting threads sleep soon.

    Must run before torch's import, which loads OpenMP and reads these variables. The user's settings stay.
    """
    environment.setdefault("OMP_NUM_THREADS", str(cpu_cores()))
    if not any(name in environment for name in WAITING_VARIABLES):
        environment[SPIN_VARIABLE] = str(SPIN_COUNT)
