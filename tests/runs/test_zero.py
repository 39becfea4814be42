"""Whole ZeRO runs as a user starts them. Oracle: the single-process run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.test_parity_and_resume import overrides, same
from tests.support.command import column, mgpu, run_folder
from tests.support.sampling import one_in

pytestmark = pytest.mark.slow

# 25 held-out samples: the last evaluation step batch leaves most ranks without a micro-batch.
MORE = (
    "data.validation_max_samples=25",
    "trainer.max_steps=12",
    "objective.sample_prompts=['def ']",
    "objective.sample_max_new_tokens=4",
)


@pytest.fixture(scope="module")
def single(cache: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("single")
    return run_folder(mgpu(cache, cwd, *overrides(corpus, "strategy=single", *MORE)))


@pytest.mark.parametrize(("preset", "devices"), one_in(4, [("zero3", 2), ("zero3", 4), ("zero1", 2), ("zero3_cpu", 2)]))
def test_the_numbers_are_those_of_one_process(
    cache: Path, corpus: Path, tmp_path: Path, single: Path, preset: str, devices: int
) -> None:
    words = overrides(corpus, f"strategy={preset}", f"trainer.devices={devices}", *MORE)
    folder = run_folder(mgpu(cache, tmp_path, *words))
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        same(column(folder, name), column(single, name), 1e-5)
    summary, alone = (json.loads((path / "summary.json").read_text()) for path in (folder, single))
    assert summary["model"] == alone["model"]
    assert [sample["prompt"] for sample in summary["samples"]] == ["def "]


@pytest.mark.exhaustive  # test_megatron moves a run from ZeRO-3 through others to one process
def test_a_zero3_checkpoint_goes_on_in_one_process(cache: Path, corpus: Path, tmp_path: Path, single: Path) -> None:
    words = overrides(corpus, "strategy=zero3", "trainer.devices=4", *MORE, "scheduler.total_steps=12")
    first = run_folder(mgpu(cache, tmp_path, *words, "trainer.max_steps=5"))
    again = overrides(corpus, "strategy=single", *MORE, "scheduler.total_steps=12", f"checkpoint.resume={first}")
    second = run_folder(mgpu(cache, tmp_path, *again))
    losses = column(single, "train/loss")
    same(column(first, "train/loss"), {step: losses[step] for step in range(1, 6)}, 1e-5)
    same(column(second, "train/loss"), {step: losses[step] for step in range(6, 13)}, 1e-5)
