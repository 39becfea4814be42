"""Worker processes of ``sweep.parallel``: each runs points from the sweep's store on its share of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import ExitStack, suppress
from types import FrameType

from mgpu_pipe.errors import EXIT_OK, EXIT_STOPPED, BadInputError, print_line
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.signals import taken_over
from mgpu_pipe.report import numbers as figures
from mgpu_pipe.sweep.point import RESUMABLE, RUNNING, WAITING
from mgpu_pipe.sweep.store import Store
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.system.hardware import gpu_count

WORKER = "MGPU_PIPE_SWEEP_WORKER"
"""Environment variable of the workers: the numbers of the points to run; empty: all."""
POLL_S = 0.5


def is_worker() -> bool:
    return WORKER in os.environ


def chosen_points() -> list[int]:
    """Numbers of the points that this worker runs; empty: all."""
    numbers = os.environ[WORKER].split()
    if not all(number.isascii() and number.isdigit() and len(number) < 19 for number in numbers):
        raise BadInputError(f"{WORKER}={os.environ[WORKER]}: is set by a sweep for its workers alone; unset it")
    return [int(number) for number in numbers]


def work_together(store: Store, chosen: Collection[int]) -> None:
    """Start ``sweep.parallel`` workers, wait for them and print the status of their points.

    Each worker gets its share of this process's cores and GPUs; workers share GPUs if there are fewer. They end with
    this process, which forwards stop signals to them.

    Args:
        chosen: numbers of the points to run; empty: all.
    """
    count = int(store.spec["parallel"])
    cores, gpus = sorted(os.sched_getaffinity(0)), _visible_gpus()
    printed = {point.number: point.status for point in store.points()}
    children: list[subprocess.Popen[bytes]] = []
    stopped = False

    def forward_stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)

    before = taken_over(forward_stop)
    try:
        with ExitStack() as logs:
            for index in range(count):
                log = logs.enter_context(open(store.folder / f"worker-{index + 1}.log", "ab"))
                environment = {**os.environ, WORKER: " ".join(map(str, sorted(chosen)))}
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index::count] or [gpus[index % len(gpus)]])
                share = cores[index::count] or [cores[index % len(cores)]]
                command = bind_command(python_module("mgpu_pipe", "sweeps", "resume", str(store.folder)))
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
                os.sched_setaffinity(child.pid, share)
                children.append(child)
                if stopped:  # during the start of this child
                    forward_stop(signal.SIGTERM, None)
                    break
        while any(child.poll() is None for child in children):
            _print_changes(store, printed)
            with suppress(subprocess.TimeoutExpired):
                next(child for child in children if child.returncode is None).wait(POLL_S)
        _print_changes(store, printed)
        for worker, child in enumerate(children, 1):
            if not stopped and child.returncode not in (EXIT_OK, EXIT_STOPPED):
                ending = f"{child.returncode}; see {store.folder / f'worker-{worker}.log'}"
                print_line(f"error: a process of the sweep ended by {ending}", file=sys.stderr)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _print_changes(store: Store, printed: dict[int, str]) -> None:
    """Print each point whose status changed since the last call."""
    points = store.points()
    metric = store.spec["metrics"][0]
    for point in points:
        if printed.get(point.number, WAITING) != point.status:
            printed[point.number] = point.status
            ended = point.status != RUNNING and point.status not in RESUMABLE
            value = f", {metric} {figures.figure(point.metric(metric))}" if ended and metric in point.metrics else ""
            overrides = " ".join(point.overrides)
            print_line(
                f"run {point.number} of {len(points)}: {point.status}{value}: {overrides}", file=sys.stderr, flush=True
            )


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [gpu for gpu in visible.split(",") if gpu] if visible is not None else list(map(str, range(gpu_count())))
