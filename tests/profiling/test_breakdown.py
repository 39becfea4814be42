"""Where time went, from times made up. Oracle: the sums, done by hand."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.report.measurements import WIDTH, bars
from mgpu_pipe.report.measurements import memory_bands as memory_line
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.profiling.advice import findings
from mgpu_pipe.training.profiling.device_trace import Blocked, Marks, breakdown, device_timeline
from mgpu_pipe.training.profiling.link_table import axis_of
from mgpu_pipe.training.profiling.memory_use import (
    POINTS,
    MemorySample,
    MemoryUse,
    RankMemory,
    phases_of_samples,
    rank_memory,
    thin_samples,
)
from mgpu_pipe.training.profiling.rank_times import RankTimes, StepTimes, slowest


def advise(times: StepTimes, config: RunConfig, *rest: Any) -> list[str]:
    return findings(times, config.strategy, config.data, config.objective, *rest)


def rank_times(compute: float, waits: float, node: str = "one", host: float = 0.0, data: float = 0.0) -> RankTimes:
    own = {"compute": compute, "optimizer": 0.0, "data": data, "host": host}
    step = sum(own.values()) + waits
    return RankTimes(node, step, own, {"tp": waits}, {"tp": 0.0}, {}, "Slow.on_train_batch_end", host, 1.0)


def test_a_collective_is_waiting_until_its_last_rank_comes_and_transfer_from_then_on() -> None:
    phases = [(0.0, 10.0, "compute"), (10.0, 12.0, "host"), (12.0, 13.0, "data"), (13.0, 15.0, "optimizer")]
    blocked = [
        Blocked(4.0, 7.0, "tp", "a", 0),  # the last one, rank 2, comes at 6
        Blocked(9.0, 11.0, "dp_shard", "b", 0),  # of two phases; this rank is the last to come
        Blocked(13.5, 14.0, "tp", "a", 1),  # rank 1 comes after its end, which only clocks can make
    ]
    arrivals = [{"a": [4.0, 13.5], "b": [9.0]}, {"a": [3.0, 20.0]}, {"a": [6.0, 1.0], "b": [2.0]}]
    found = breakdown(phases, blocked, arrivals)
    assert found.total == 15.0
    assert found.by_phase == {"compute": 6.0, "host": 1.0, "data": 1.0, "optimizer": 1.5}
    assert found.waiting == {"tp": 2.5, "dp_shard": 0.0}
    assert found.transfer == {"tp": 1.0, "dp_shard": 2.0}
    assert found.waits_for == {2: 2.0, 1: 0.5}
    assert sum(found.by_phase.values()) + sum(found.waiting.values()) + sum(found.transfer.values()) == found.total


def test_groups_have_the_names_of_the_configuration() -> None:
    dims = ParallelDims(pp=2, dp_shard=2, tp=2)  # rank = 4 pp + 2 dp_shard + tp
    assert [axis_of(dims, ranks) for ranks in ([0, 1], [0, 2], [1, 5])] == ["tp", "dp_shard", "pp"]
    assert axis_of(dims, [0, 1, 2, 3]) == "dp_shard x tp"
    assert axis_of(dims, range(8)) == "all ranks"
    assert axis_of(ParallelDims(dp_replicate=4), range(4)) == "dp_replicate"
    experts = ParallelDims(dp_shard=4, ep=2)
    assert axis_of(experts, [0, 1], "ep") == "ep"
    assert [axis_of(experts, range(4), "", kind) for kind in ("all-to-all", "all-gather")] == ["ep", "dp_shard"]
    assert axis_of(ParallelDims(dp_shard=2, cp=2, ep=2), [0, 1], "", "all-to-all") == "cp", "heads, not tokens"
    assert axis_of(experts, [0, 2], "expert_shard") == axis_of(experts, range(4), "dp_shard_cp") == "dp_shard"


@pytest.mark.parametrize("packed", [False, True])
def test_a_gpus_time(tmp_path: Path, packed: bool) -> None:
    """A made-up trace: a collective beside a kernel is hidden; with nothing on the GPU it waits for host or data."""

    def event(cat: str, name: str, begin: float, end: float, **args: object) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": 5e6 + begin * 1e6, "dur": (end - begin) * 1e6, "args": args}

    group = {"Process Group Name": "7", "Process Group Ranks": "[0, 2]", "Process Group Description": "mesh_x"}
    events = [
        event("user_annotation", "begins", 0, 0),
        event("kernel", "gemm", 0, 4),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 3, 6, **{"Collective name": "_allgather_base"}, **group),
        event("kernel", "adam", 7, 9),
        event("gpu_user_annotation", "optimizer", 7, 9),
        event("kernel", "ncclDevKernel_SendRecv", 11, 12, **{"Collective name": "send"}, **group),
        event("cpu_op", "aten::mm", 0, 20),
        {"ph": "M", "name": "process_name"},
    ]
    trace = tmp_path / ("trace.json.gz" if packed else "trace.json")
    with gzip.open(trace, "wt") if packed else trace.open("w") as file:
        json.dump({"traceEvents": events}, file)
    host = [(100.0, 108.0, "compute"), (108.0, 110.0, "optimizer"), (110.0, 112.5, "data"), (112.5, 114.0, "host")]
    dims = ParallelDims(dp_shard=2, tp=2)
    marks = Marks("begins", 100.0, host, "optimizer")
    phases, blocked, arrivals = device_timeline(trace, marks, lambda ranks, *_: axis_of(dims, ranks))
    assert dict(arrivals) == {"7 [0, 2]": [103.0]}
    assert [(stretch.begin, stretch.end, stretch.axis) for stretch in blocked] == [
        (104.0, 106.0, "dp_shard"),
        (111.0, 112.0, "dp_shard"),
    ]
    found = breakdown(phases, blocked, [arrivals, {"7 [0, 2]": [105.0]}])
    assert found.total == 14.0
    assert found.by_phase == {"compute": 4.0, "optimizer": 2.0, "data": 1.5, "host": 3.5}
    assert (found.waiting, found.waits_for) == ({"dp_shard": 2.0}, {1: 1.0})  # of the message no more is known
    assert found.transfer == {"dp_shard": 1.0}


def test_the_slow_rank_and_the_key_that_would_help() -> None:
    config, plan = RunConfig(), BatchPlan(64, 2, 4)
    even = StepTimes(3, 6, [rank_times(0.9, 0.1), rank_times(0.88, 0.12)], [])
    assert slowest(even.ranks) is None
    dims = ParallelDims(dp_shard=2)
    assert len(advise(even, config, dims, plan)) == 1
    late = [rank_times(0.4, 0.6), rank_times(0.4, 0.1, "two", host=0.5), rank_times(0.4, 0.6)]
    assert slowest(late) == (1, "host", pytest.approx(0.5))
    told = advise(StepTimes(3, 6, late, []), config, ParallelDims(tp=3), plan)
    assert "rank 1 on node two is the slowest" in told[1] and "callback Slow.on_train_batch_end (500 ms)" in told[1]
    assert told[2].endswith("waiting: help rank 1 first")
    starved = [rank_times(0.4, 0.0, data=0.6), rank_times(0.4, 0.6)]
    told = advise(StepTimes(3, 6, starved, []), config, ParallelDims(tp=2), plan)
    assert slowest(starved) == (0, "data", pytest.approx(0.6)) and "data.num_workers=" in told[1] + told[-1]
    alone = [rank_times(0.5, 0.0, host=0.5)]
    (line,) = advise(StepTimes(3, 6, alone, []), config, ParallelDims(), plan)
    assert line.startswith("warning: 50% of a step is neither compute") and line.endswith("_batch_end (500 ms)")
    for axis, sizes, key in (
        ("dp_shard", {"dp_shard": 2}, "data.micro_batch_size=8"),
        ("dp_replicate", {"dp_replicate": 2}, "data.global_batch_size=128"),
        ("tp", {"tp": 4}, "strategy.tp=2"),
        ("cp", {"cp": 4}, "strategy.context.method=ulysses"),
        ("pp", {"pp": 4}, "data.micro_batch_size=2"),
        ("ep", {"dp_shard": 4, "ep": 4}, "strategy.ep=2"),
    ):
        own = {"compute": 0.6, "optimizer": 0.0, "data": 0.0, "host": 0.0}
        one = RankTimes("one", 1.0, own, {axis: 0.1}, {axis: 0.3}, {}, "", 0.0, 1.0)
        told = advise(StepTimes(3, 6, [one, one], []), config, ParallelDims(**sizes), plan)
        assert f"along {axis}; try {key}" in told[-1], told


def test_uneven_work_names_its_key() -> None:
    config, plan = RunConfig(), BatchPlan(64, 2, 4)
    times = StepTimes(3, 6, [rank_times(0.9, 0.1), rank_times(0.88, 0.12)], [])
    asked = replace(config, data=replace(config.data, balance="cost"))
    busiest = "attention of the busiest of 2 processes over their mean: "
    for chosen, uneven, line in (
        (config, (1.31, 1.02), "1.31, 1.02 with data.balance=cost; try it"),
        (config, (1.04, 1.02), "1.04, 1.02 with data.balance=cost"),
        (asked, (1.31, 1.02), "1.31 as the samples come, 1.02 as data.balance=cost deals them"),
    ):
        assert advise(times, chosen, ParallelDims(dp_shard=2), plan, uneven)[-1] == busiest + line


def test_a_summary_of_another_hand_is_read_whole_or_not_at_all() -> None:
    values = {"first": 3, "last": 6, "ranks": [rank_times(0.75, 0.25).as_dict()], "findings": ["<b>"]}
    drawn = bars(values)
    assert drawn is not None and [part["width"] for part in drawn["rows"][0]["stretches"]] == [750, 0, 0, 0, 250, 0]
    assert sum(part["width"] for part in drawn["rows"][0]["stretches"]) == WIDTH
    assert drawn["table"]["rows"][-1][2] == "75%"
    broken: Any
    for broken in (None, [], {}, {**values, "ranks": []}, {**values, "ranks": [{"own": 3}]}, {**values, "first": None}):
        assert bars(broken) is None
    nan = {**rank_times(0.75, 0.25).as_dict(), "step_s": float("nan")}
    assert bars({**values, "ranks": [nan]}) is None


def test_memory_has_the_phase_in_which_it_was_looked_at() -> None:
    phases = [(0.0, 1.0, "data"), (1.0, 6.0, "compute"), (6.0, 7.0, "optimizer"), (7.0, 8.0, "host")]
    samples = [
        MemorySample(at, at + 1, at + 2, at / 10) for at in (0.5, 1.0, 2.0, 3.5, 4.2, 4.9, 5.5, 6.0, 6.5, 7.5, 9.0)
    ]
    names = phases_of_samples(samples, phases, [(3.0, 4.0), (4.5, 5.0)])  # of two micro-batches
    shown = {"f": "forward", "b": "backward", "o": "optimizer", "r": "rest"}
    assert names == [shown[letter] for letter in "rrfbfbbborr"]
    found = rank_memory(samples, names)
    assert found.used == {"forward": 5.2, "backward": 7.0, "optimizer": 7.5, "rest": 10.0}
    assert (found.held, found.split, found.peak) == (11.0, 0.9, 10.0)
    many = [MemorySample(number / 1000, number % 7, 9.0, 0.0) for number in range(1000)]
    line = thin_samples(many, ["rest"] * 1000, 0.0)
    assert len(line) <= POINTS and all(used >= 4 for _, used, *_ in line), "peaks are kept"


def test_memory_of_another_hand_is_read_whole_or_not_at_all() -> None:
    line = [(0.1, 1.0, 2.0, "forward"), (0.4, 2.0, 2.0, "forward"), (1.0, 1.0, 2.0, "optimizer")]
    used = {"forward": 2.0, "backward": 1.5, "optimizer": 1.0, "rest": 0.0}
    values = MemoryUse("cuda", [RankMemory(used, 2.0, 0.25)], 0, line).as_dict()
    drawn = memory_line(json.loads(json.dumps(values)))
    assert drawn is not None and drawn["table"]["names"][-2:] == ["held", "fragmented"]
    assert drawn["table"]["rows"] == [["0", "2.000", "1.500", "1.000", "0.000", "2.000", "0.250"]]
    assert [(band["x"], band["width"], band["title"]) for band in drawn["bands"]] == [
        (0.0, 400.0, "forward"),
        (400.0, 600.0, "optimizer"),
    ]
    assert drawn["used"] == "100.0,60.0 400.0,0.0 1000.0,60.0" and drawn["held"].endswith("1000.0,0.0")
    of_cpu = memory_line({**values, "device": "cpu"})
    assert of_cpu is not None and not of_cpu["held"] and of_cpu["table"]["names"][-1] == "rest"
    broken: Any
    for broken in ({"line": []}, {"line": [[0, 1, 2, "<b>"]]}, {"ranks": []}, {"ranks": [{"used": used}]}):
        assert memory_line({**values, **broken}) is None
    assert memory_line(None) is None
