"""Whole runs under sharded strategies, as a user starts them. Oracle: the run of one process."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from mgpu_pipe.runs.metrics_file import read_metrics
from tests.runs.support import overrides, same
from tests.support.command import column, mgpu, run_folder, start

pytestmark = pytest.mark.slow

ADDRESS_SPACE = 3 << 30


@pytest.mark.parametrize(
    "strategy",
    [
        ("strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=3"),
        pytest.param(("strategy=fsdp", "trainer.devices=4", "data.micro_batch_size=3"), marks=pytest.mark.exhaustive),
        pytest.param(("strategy=hsdp", "strategy.dp_replicate=2", "trainer.devices=4"), marks=pytest.mark.exhaustive),
        pytest.param(
            ("strategy=fsdp", "trainer.devices=2", "strategy.activation_checkpointing=full"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_sharded_run_is_the_run_of_one_process(
    cache: Path, corpus: Path, tmp_path: Path, alone: Path, strategy: tuple[str, ...]
) -> None:
    folder = run_folder(mgpu(cache, tmp_path, *overrides(corpus, *strategy)))
    same(folder, alone)
    summary, single = (json.loads((path / "summary.json").read_text()) for path in (folder, alone))
    assert summary["samples"] == single["samples"]
    shards = summary["topology"]["dp_shard"]
    for part in ("weights_gib", "gradients_gib", "optimizer_gib"):
        whole = single["memory"][part][0]
        assert all(abs(shards * value / whole - 1) < 0.02 for value in summary["memory"][part]), part
    assert all(0 < value < single["memory"]["activations_gib"][0] for value in summary["memory"]["activations_gib"])
    world = summary["world_size"]
    assert {name: len(values) for name, values in summary["times"].items()} == dict.fromkeys(single["times"], world)
    assert all(time > 0 for time in (*summary["times"]["step_s"], *summary["times"]["cpu_s"]))
    steps = column(folder, "train/loss").keys()
    for rank in range(world):
        rows = read_metrics(folder / "logs" / f"rank-{rank}.csv")
        assert rows["step"] == list(steps) and all(rows["cpu_s"]) and all(rows["peak_gib"])
    report = (folder / "report.html").read_text()
    assert "Processor time of each rank" in report and "rank 1" in report
    assert "CPU time, mean" in report and "activations" in report and "optimizer" in report


@pytest.mark.exhaustive  # test_megatron moves a run through four strategies
def test_a_run_goes_on_under_another_strategy(cache: Path, corpus: Path, tmp_path: Path, alone: Path) -> None:
    first = overrides(corpus, "strategy=fsdp", "trainer.devices=3", "scheduler.total_steps=20", "trainer.max_steps=10")
    folder = run_folder(mgpu(cache, tmp_path, *first))
    for more in (("strategy=ddp", "trainer.devices=2"), ("strategy=hsdp", "strategy.dp_shard=2", "trainer.devices=4")):
        going_on = overrides(corpus, *more, f"checkpoint.resume={folder}")
        same(run_folder(mgpu(cache, tmp_path, *going_on)), alone, first=11)


def test_a_rank_out_of_memory_says_what_would_help(cache: Path, corpus: Path, tmp_path: Path) -> None:
    def little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))

    arguments = overrides(
        corpus,
        "strategy=ddp",
        "trainer.devices=2",
        "data.seq_len=512",
        "data.global_batch_size=2048",
        "data.micro_batch_size=1024",
        "model.config.hidden_size=256",
        "trainer.max_steps=2",
        "trainer.memory_check=off",
    )
    process = start(cache, tmp_path, *arguments, preexec_fn=little_memory)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, out + err
    said = next(line for line in (out + err).splitlines() if "ran out of memory" in line)
    assert said.startswith("error: rank ")
    assert "the largest part is activations" in said
    assert said.index("strategy.activation_checkpointing=full (saves") < said.index("data.micro_batch_size=512 (saves")
    assert said.count("saves about") == 3
