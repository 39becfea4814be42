"""Stand-in workers for tests of the supervisor: real processes that do one thing a training worker may do."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import ConfigError, NonFiniteError
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.launch.failure import write_error
from mgpu_pipe.system.process_end import Lifeline


def fail(paths: RunPaths, rank: int, error: BaseException, code: int) -> None:
    try:
        raise error
    except type(error) as raised:
        write_error(paths.rank_error(rank), raised, rank)
    os._exit(code)


def wait_for_stop(code: int, after: float = 0.0) -> None:
    while not stop.stop_requested():
        time.sleep(0.01)
    time.sleep(after)
    sys.exit(code)


def all_reduce() -> None:
    import torch
    import torch.distributed as dist

    from mgpu_pipe.launch.process_group import process_group
    from mgpu_pipe.launch.world import World, launcher_store

    world = World.from_environment(os.environ)
    with process_group(world, launcher_store(world, 30), "cpu", 30):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        print("sum", int(ones.sum()), flush=True)


def main() -> None:
    lifeline = Lifeline.attach(os.environ)
    stop.install(second_leaves=False)
    folder, behaviour = sys.argv[1], sys.argv[2]
    paths, rank, attempt = RunPaths(Path(folder)), int(os.environ["RANK"]), int(os.environ["MGPU_ATTEMPT"])
    print(f"pid {os.getpid()} attempt {attempt} resume {os.environ.get('MGPU_RESUME', '-')}", flush=True)
    (paths.root / f"pid-{rank}").write_text(str(os.getpid()))
    assert lifeline is not None
    lifeline.wait_for_go()
    if behaviour == "finish":
        return
    if behaviour == "sleep":
        time.sleep(600)
    if behaviour == "fork":  # a loader process, and one that is executed, not forked
        import multiprocessing
        import subprocess

        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        executed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (paths.root / f"child-{rank}").write_text(f"{child.pid} {executed.pid}")
        time.sleep(600)
    if behaviour == "stop":
        wait_for_stop(75)
    if behaviour == "stop_in_a_second":
        wait_for_stop(75, after=1.0)
    if behaviour == "stop_slowly":
        wait_for_stop(75, after=600)
    if behaviour == "all_reduce":
        all_reduce()
    if behaviour == "config_error":
        fail(paths, rank, ConfigError("optimizer.lr", -1, "use a positive number"), 2)
    if behaviour == "nan":
        fail(paths, rank, NonFiniteError("the loss", 3, 0, 31, None), 1)
    if behaviour == "first_attempt_crashes" and attempt == 1:
        fail(paths, rank, ValueError("bad luck"), 1)
    if behaviour == "rank1_crashes":
        if rank == 1:
            fail(paths, rank, ValueError("rank 1 has a defect"), 1)
        time.sleep(600)
    if behaviour == "peers_follow":  # rank 0's error is told earlier, but only follows from rank 1's
        if rank == 0:
            while not (paths.root / "pid-1").exists():
                time.sleep(0.01)
            fail(paths, rank, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"), 1)
        time.sleep(0.2)
        fail(paths, rank, MemoryError("rank 1 ran out of memory"), 1)
    if behaviour == "wait_for_rank_1":  # what gloo says on a rank whose peer does not come
        if rank == 1:
            time.sleep(600)
        while not (paths.root / "stopped").exists():
            time.sleep(0.01)
        fail(paths, rank, RuntimeError("[gloo] Timed out waiting 600000ms for recv operation to complete"), 1)
    if behaviour == "hang_in_rank_1":
        if rank == 1:
            time.sleep(600)
        fail(paths, rank, RuntimeError("[gloo] Timed out waiting 4000ms for recv operation to complete"), 1)
    if behaviour == "rank1_killed":
        if rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(600)


if __name__ == "__main__":
    main()
