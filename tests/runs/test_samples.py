"""Samples while a run goes on. Oracles: the same run without them, the samples that a run makes at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgpu_pipe.runs.record import append_samples, cut_samples_after, read_samples
from tests.support.command import column, mgpu, run_folder
from tests.support.needs import need_torch_compile

BASE = (
    *("model=llama_tiny", "data=synthetic", "data.synthetic.num_documents=100", "data.seq_len=64"),
    *("data.global_batch_size=8", "precision=fp32", "scheduler.total_steps=8", "trainer.val_every_n_steps=4"),
    *("objective.sample_prompts=[w1, w2]", "objective.sample_max_new_tokens=6", "logger=none"),
)
EVERY = "trainer.sample_every_n_steps=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ddp", "tp", "pp", "cp", "zero2", "zero3")),
    ],
)
def test_sampling_changes_nothing_of_the_training(cache: Path, tmp_path: Path, strategy: str) -> None:
    words = (*BASE, f"strategy={strategy}", "trainer.devices=2", "trainer.max_steps=8")
    _compare(cache, tmp_path, words)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sampling_leaves_compiled_blocks_as_they_are(cache: Path, tmp_path: Path) -> None:
    need_torch_compile()
    _compare(cache, tmp_path, (*BASE, "strategy=single", "model.compile=true", "trainer.max_steps=8"))


def _compare(cache: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    without, sampled = (run_folder(mgpu(cache, tmp_path, *words, *more)) for more in ((), (EVERY,)))
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(sampled, name) == column(without, name)
    assert not (without / "samples.jsonl").exists()
    made = dict(read_samples(sampled / "samples.jsonl"))
    assert list(made) == [2, 4, 6, 8]
    assert made[8] == json.loads((without / "summary.json").read_text())["samples"]
    assert "Earlier in training (3)" in (sampled / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_resumed_run_has_the_samples_of_one_that_was_not_interrupted(cache: Path, tmp_path: Path) -> None:
    words = (*BASE, "strategy=single", EVERY)
    whole = run_folder(mgpu(cache, tmp_path, *words, "trainer.max_steps=8"))
    folder = run_folder(mgpu(cache, tmp_path, *words, "trainer.max_steps=4"))
    append_samples(folder / "samples.jsonl", 6, [{"prompt": "w1", "text": "of a step that was lost"}])
    again = (f"run.dir={folder}", "checkpoint.resume=auto", "trainer.max_steps=8")
    run_folder(mgpu(cache, tmp_path, *words, *again))
    assert read_samples(folder / "samples.jsonl") == read_samples(whole / "samples.jsonl")


def test_lines_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert read_samples(path) == []
    cut_samples_after(path, 3)
    assert not path.exists()
    for step in (1, 3, 5):
        append_samples(path, step, [{"prompt": "a", "text": str(step)}])
    with open(path, "a") as file:
        file.write('[1]\n{"step": "7", "samples": []}\n' + "[" * 10_000 + '\n{"step": 9, "sam')
    assert [step for step, _ in read_samples(path)] == [1, 3, 5]
    cut_samples_after(path, 3)
    assert [step for step, _ in read_samples(path)] == [1, 3]
