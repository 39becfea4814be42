"""Groups of gloo processes for the benchmarks: the tests', but each a fresh one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from tests.support.processes import run_processes

LONGEST_S = 3600.0


def run_group(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of ``function(*args)`` by rank, from fresh processes with one thread each.

    Raises:
        AssertionError: a process failed, with its traceback, or died.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    spawned = multiprocessing.get_context("spawn")
    return run_processes(world_size, function, *args, timeout_s=LONGEST_S, context=spawned)
