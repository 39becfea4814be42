"""What is seen of collectives, on real processes. Oracle: what was issued."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.topology import Meshes, ParallelDims
from mgpu_pipe.training.profiling.device_trace import breakdown
from mgpu_pipe.training.profiling.link_table import axis_of
from mgpu_pipe.training.profiling.step_profiler import StepProfiler
from mgpu_pipe.training.profiling.step_watches import CollectiveWatch
from tests.support.processes import run_processes

LATE, LATE_S = 2, 0.3


def watched() -> dict[str, Any]:
    """Rank 2 is late to an asynchronous sum, then sends rank 3 a message late; the rest is along rows."""
    dims, rank = ParallelDims(dp_shard=2, tp=2), dist.get_rank()
    meshes = Meshes(dims, "cpu")
    rows, columns = meshes.group("tp"), meshes.group("dp_shard")
    entries = [vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"]]
    watch = CollectiveWatch(partial(axis_of, dims))
    x = torch.ones(4)
    dist.barrier()
    with watch.watching():
        began = time.perf_counter()
        if rank == LATE:
            time.sleep(LATE_S)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        gathered, kept = torch.empty(8), torch.empty(2)
        dist.all_gather_into_tensor(gathered, x, group=rows)
        dist.reduce_scatter_tensor(kept, x, group=columns)
        if rank == LATE:
            time.sleep(LATE_S)
            dist.send(x, 3)
        elif rank == 3:
            dist.recv(x, 2)
        ended = time.perf_counter()
    assert [vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"]] == entries
    dist.all_reduce(x)  # is not seen
    arrivals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(arrivals, dict(watch.arrivals))
    found = breakdown([(began, ended, "compute")], watch.blocked, arrivals)
    return {
        "counts": sorted(len(times) for times in watch.arrivals.values()),
        "axes": [stretch.axis for stretch in watch.blocked],
        "found": found,
    }


def test_collectives_are_seen_whole_and_the_late_rank_is_waited_for() -> None:
    ranks = run_processes(4, watched)
    for rank, one in enumerate(ranks):
        messages = 1 if rank >= 2 else 0
        assert one["counts"] == [1] * (3 + messages)
        assert set(one["axes"]) == {"all ranks", "tp", "dp_shard"}
        found = one["found"]
        parts = (found.by_phase, found.waiting, found.transfer)
        assert abs(sum(sum(part.values()) for part in parts) - found.total) < 1e-9
        if rank != LATE:
            assert max(found.waits_for, key=found.waits_for.get) == LATE
            assert found.waiting["all ranks"] > found.transfer["all ranks"]
    late, last = ranks[LATE]["found"], ranks[3]["found"]
    assert late.by_phase["compute"] > LATE_S > late.waiting["all ranks"]
    assert last.waiting["all ranks"] > 1.5 * LATE_S, "the sum and the message"


def other_clock() -> dict[str, float]:
    """Rank 1 is on another machine, whose clock is ahead by a thousand seconds."""
    rank = dist.get_rank()
    profiler = StepProfiler(ParallelDims(dp_replicate=2), torch.device("cpu"), 1, 1, 0, None)
    module: Any = sys.modules[StepProfiler.__module__]
    ahead = 1000.0 * rank
    module.boot_id = lambda: f"boot {rank}"
    module.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead)
    profiler.start("run_training_batch")
    watch: Any = sys.modules[CollectiveWatch.__module__]
    watch.time = module.time
    if rank == 0:
        time.sleep(LATE_S)
    dist.all_reduce(torch.ones(1))
    profiler.stop("run_training_batch")
    profiler.start("run_training_batch")
    times = profiler._rank_times(1.0)
    return {"waiting": times.waiting.get("dp_replicate", 0.0), **times.waits_for}


def test_clocks_of_several_machines_are_compared() -> None:
    first, second = run_processes(2, other_clock)
    assert second["0"] > 0.5 * LATE_S, "the first came last"
    assert first["waiting"] < 0.5 * LATE_S


@pytest.mark.slow
def test_what_trains_imports_nothing_of_it() -> None:
    program = "import sys; from mgpu_pipe.launch.worker import import_all; import_all(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "mgpu_pipe.training.train" in imported
    assert not {StepProfiler.__module__, CollectiveWatch.__module__} & imported
