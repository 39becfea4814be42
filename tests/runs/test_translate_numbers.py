"""The experiment translate_numbers, four steps long."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command import mgpu, run_folder


def test_four_steps_measure_exact_match_and_show_answers(cache: Path, tmp_path: Path) -> None:
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "scheduler.warmup_steps=1", "logger=none")
    small = ("data.numbers.count=200", "data.global_batch_size=16")
    folder = run_folder(mgpu(cache, tmp_path, "experiment=translate_numbers", "trainer.devices=2", *short, *small))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["model"]["class"] == "T5ForConditionalGeneration"
    assert 0 <= summary["metrics"]["val/exact_match"] <= summary["metrics"]["val/accuracy"] < 1
    assert [sample["prompt"] for sample in summary["samples"]] == ["907", "two thousand thirteen"]
    assert all(sample["text"].startswith(" \u2192 ") for sample in summary["samples"])
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert "exact match" in report and "two thousand thirteen" in report
