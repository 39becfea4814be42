"""Whole runs under sharded strategies, as a user starts them. Oracle: the run of one process."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from tests.support.command import column, mgpu, run_folder, start

pytestmark = pytest.mark.slow

BASE = (
    "model=llama_tiny", "data=text_files", "precision=fp32", "optimizer.lr=3e-4", "data.seq_len=64",
    "data.validation_max_samples=21", "data.global_batch_size=24", "trainer.val_every_n_steps=10",
    "trainer.max_steps=20", "scheduler.warmup_steps=2", "logger=none", "objective.sample_prompts=['def ']",
    "objective.sample_max_new_tokens=8",
)  # fmt: skip
MEASURED = ("train/loss", "train/grad_norm", "val/loss")
ADDRESS_SPACE = 8 << 30


def overrides(corpus: Path, *more: str) -> list[str]:
    return [*BASE, f"data.paths=[{corpus}/*.txt]", *more]


def same(folder: Path, other: Path, first: int = 1) -> None:
    for name in MEASURED:
        mine, truth = column(folder, name), column(other, name)
        steps = [step for step in truth if step >= first]
        assert steps
        assert max(abs(mine[step] / truth[step] - 1) for step in steps) <= 1e-5, name


@pytest.fixture(scope="module")
def alone(cache: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(mgpu(cache, tmp_path_factory.mktemp("alone"), *overrides(corpus, "strategy=single")))


@pytest.mark.parametrize(
    "strategy",
    [
        ("strategy=fsdp", "trainer.devices=4", "data.micro_batch_size=3"),
        ("strategy=hsdp", "strategy.dp_replicate=2", "trainer.devices=4"),
        ("strategy=fsdp", "trainer.devices=2", "strategy.activation_checkpointing=full"),
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
    report = (folder / "report.html").read_text()
    assert "activations" in report and "optimizer" in report


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
        corpus, "strategy=ddp", "trainer.devices=2", "data.seq_len=512", "data.global_batch_size=512",
        "data.micro_batch_size=256", "model.config.hidden_size=256", "trainer.max_steps=2",
    )  # fmt: skip
    process = start(cache, tmp_path, *arguments, preexec_fn=little_memory)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, out + err
    said = next(line for line in (out + err).splitlines() if "ran out of memory" in line)
    assert said.startswith("error: rank ")
    assert "the largest part is activations" in said
    assert said.index("strategy.activation_checkpointing=full (saves") < said.index("data.micro_batch_size=128 (saves")
    assert said.count("saves about") == 3
