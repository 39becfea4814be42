"""Links between ranks, and the trace of a step."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.training.profiling import measure_hardware as measuring
from mgpu_pipe.training.profiling.link_table import Link, suspects, table, verdict
from mgpu_pipe.training.profiling.measure_hardware import measure_links, tournament
from mgpu_pipe.training.profiling.rank_times import StepTimes
from tests.support.command import mgpu, run_folder
from tests.support.processes import run_processes
from tests.support.worlds import JoinedRun

SLOW_PAIR = {1, 3}
RATE = 30e6
"""Bytes per second of the slow link."""


def links_of_four() -> list[Link]:
    """What rank 1 sends rank 3 takes its time."""
    send: Any = dist.send

    def slowed(tensor: torch.Tensor, dst: Any, *_: Any) -> None:
        if {dist.get_rank(), dst} == SLOW_PAIR:
            time.sleep(tensor.nbytes / RATE)
        send(tensor, dst)

    measuring.MESSAGE["cpu"] = measuring.MIB
    measuring.dist.send = slowed  # type: ignore[assignment]
    return measure_links(torch.device("cpu"))


def test_a_link_slowed_on_purpose_is_named() -> None:
    links, *others = run_processes(4, links_of_four)
    assert all(other == links for other in others), "all ranks know all links"
    assert [(link.first, link.second) for link in links] == list(itertools.combinations(range(4), 2))
    slowest = min(links, key=lambda link: link.rate)
    assert {slowest.first, slowest.second} == SLOW_PAIR and slowest.rate < RATE
    assert suspects(links)[0] == slowest
    assert any(line.startswith("the link of ranks 1 and 3 (node ") for line in verdict(links))


def test_every_rank_meets_every_other_once_and_one_at_a_time() -> None:
    for ranks in range(2, 10):
        rounds = list(tournament(ranks))
        met = [pair for pairs in rounds for pair in pairs]
        assert sorted(met) == list(itertools.combinations(range(ranks), 2))
        for pairs in rounds:
            assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)


def test_links_are_slow_beside_their_like() -> None:
    near = {True: (1e-5, 8e9), False: (1e-4, 1e9)}
    links = [
        Link(a, b, f"n{a // 2}", f"n{b // 2}", a // 2 == b // 2, *near[a // 2 == b // 2])
        for a, b in itertools.combinations(range(6), 2)
    ]
    assert verdict(links) == ["no link is slower than the median by more than 2 times"], "nodes are further apart"
    late = [replace(link, latency_s=1e-3) if (link.first, link.second) == (0, 4) else link for link in links]
    (line,) = verdict(late)
    assert line.startswith("the link of ranks 0 and 4 (nodes n0 and n2) is slow: 954 MiB/s, 1000 us; the median")
    assert "954 MiB/s, 100 us" in line
    card = [replace(link, rate=link.rate / 10) if 4 in (link.first, link.second) else link for link in links]
    assert verdict(card) == ["all links of rank 4 (node n2) are slow: look at its network card and its cable"]
    _, rows = table(late)
    assert len(rows) == 15 and [row[0] for row in rows if row[-1] == "SLOW"] == ["0 - 4"]
    assert verdict(links[:1]) == ["one link has none to compare it with"]


@pytest.mark.slow
def test_the_verb_measures_the_processes_of_a_run(cache: Path, tmp_path: Path) -> None:
    words = ["doctor", "links", "strategy=ddp", "data.global_batch_size=12", "model=llama_tiny"]
    lines = mgpu(cache, tmp_path, *words, "trainer.devices=2").splitlines()
    assert lines[0].startswith("1 link of 2 ranks, by gloo") and lines[3].startswith("0 - 1")
    joined = JoinedRun(2, tmp_path, cache, tmp_path / "log", *words)
    assert joined.wait() == [0, 0]
    assert (tmp_path / "log").read_text().count("1 link of 2 ranks, by gloo") == 1, "rank 0 alone tells"
    for more, line in (
        (["trainer.devices=1", "strategy=single"], "error: trainer.devices=1: one process has no link; use at least 2"),
        (["trainer.devices=2", "trainer.num_nodes=2"], "error: trainer.num_nodes=2: this command starts processes"),
        (["trainer.devices=5"], "error: data.global_batch_size=12: not divisible by the 5 data-parallel processes"),
    ):
        said = mgpu(cache, tmp_path, *words, *more, code=2)
        assert said.startswith(line) and len(said.splitlines()) == 1, said
    assert not (tmp_path / "outputs").exists()


SMALL = ["model=llama_tiny", "data.seq_len=32", "data.global_batch_size=4", "checkpoint.save_last=false"]


def test_a_trace_of_each_rank_names_what_it_does(cache: Path, tmp_path: Path) -> None:
    words = [*SMALL, "strategy=fsdp", "trainer.devices=2", "trainer.max_steps=3"]
    folder = run_folder(mgpu(cache, tmp_path, *words, "trainer.profile=steps", "trainer.profile_steps=[2,3]"))
    for rank in range(2):
        with gzip.open(folder / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
        looked_for = ("step 1", "step 2", "step 3", "forward and backward", "optimizer")
        counts = {name: names.count(name) for name in looked_for}
        assert counts == {"step 1": 0, "step 2": 1, "step 3": 1, "forward and backward": 2, "optimizer": 2}
        assert {"data", "all-gather dp_shard", "wait for reduce-scatter dp_shard"} <= set(names)
        assert "callback StepRecorder.on_train_batch_end" in names
    times = StepTimes.read(json.loads((folder / "summary.json").read_text())["step_times"])
    assert times is not None and (times.first, times.last, len(times.ranks)) == (2, 3, 2)
    page = (folder / "report.html").read_text()
    assert "Where the time of a step goes" in page and page.count("<rect ") == 2 * 6
