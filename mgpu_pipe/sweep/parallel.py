"""Several points of a sweep at once on this machine: each process works on the sweep's store, with its share of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import ExitStack, suppress
from types import FrameType

from mgpu_pipe.child import bound
from mgpu_pipe.config.hardware import gpu_count
from mgpu_pipe.errors import EXIT_OK, EXIT_STOPPED
from mgpu_pipe.launch.stop import taken_over
from mgpu_pipe.report import numbers as figures
from mgpu_pipe.sweep.point import GOES_ON, RUNNING, WAITING
from mgpu_pipe.sweep.store import Store

WORKER = "MGPU_PIPE_SWEEP_WORKER"
"""Set for these processes: the numbers of the points that they are to run; empty: all."""
POLL_S = 0.5


def is_worker() -> bool:
    return WORKER in os.environ


def chosen_points() -> list[int]:
    """The numbers of the points that this worker is to run; none: all."""
    return [int(number) for number in os.environ[WORKER].split()]


def work_together(store: Store, chosen: Collection[int] = ()) -> None:
    """Have ``sweep.parallel`` processes work on the sweep, and tell what becomes of its points.

    Each gets its share of this process's cores and GPUs; of fewer GPUs than processes, several use one. They end with
    this process; a stop signal is handed on to them.

    Args:
        chosen: numbers of the points to run; none: all.
    """
    count = int(store.asked["parallel"])
    cores, gpus = sorted(os.sched_getaffinity(0)), _visible_gpus()
    said = {point.number: point.status for point in store.points()}
    children: list[subprocess.Popen[bytes]] = []
    stopped = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)

    before = taken_over(hand_on)
    try:
        with ExitStack() as logs:
            for at in range(count):
                log = logs.enter_context(open(store.folder / f"worker-{at + 1}.log", "ab"))
                environment = {**os.environ, WORKER: " ".join(map(str, sorted(chosen)))}
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[at::count] or [gpus[at % len(gpus)]])
                mine = cores[at::count] or [cores[at % len(cores)]]
                command = bound([sys.executable, "-m", "mgpu_pipe", "sweeps", "resume", str(store.folder)])
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
                os.sched_setaffinity(child.pid, mine)
                children.append(child)
                if stopped:  # while it was being started
                    hand_on(signal.SIGTERM, None)
                    break
        while any(child.poll() is None for child in children):
            _tell(store, said)
            with suppress(subprocess.TimeoutExpired):
                next(child for child in children if child.returncode is None).wait(POLL_S)
        _tell(store, said)
        for at, child in enumerate(children, 1):
            if not stopped and child.returncode not in (EXIT_OK, EXIT_STOPPED):
                told = f"{child.returncode}; see {store.folder / f'worker-{at}.log'}"
                print(f"error: a process of the sweep ended by {told}", file=sys.stderr)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _tell(store: Store, said: dict[int, str]) -> None:
    """Print what changed since it was last asked."""
    points = store.points()
    metric = store.asked["metrics"][0]
    for point in points:
        if said.get(point.number, WAITING) != point.status:
            said[point.number] = point.status
            ended = point.status != RUNNING and point.status not in GOES_ON
            value = f", {metric} {figures.figure(point.metric(metric))}" if ended and metric in point.metrics else ""
            shown = " ".join(point.overrides)
            print(f"run {point.number} of {len(points)}: {point.status}{value}: {shown}", file=sys.stderr, flush=True)


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [one for one in visible.split(",") if one] if visible is not None else list(map(str, range(gpu_count())))
