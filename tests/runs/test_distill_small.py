"""The experiment distill_small, four steps long, and the run that teaches it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import mgpu, run_folder


@pytest.mark.exhaustive
@pytest.mark.slow
def test_four_steps_learn_from_the_run_of_another_experiment(cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    teacher = (Path(__file__).parents[2] / "conf" / "experiment" / "quickstart.yaml").read_text(encoding="utf-8")
    for long, small in (("max_steps: 240", "max_steps: 4"), ("warmup_steps: 20", "warmup_steps: 1")):
        assert long in teacher
        teacher = teacher.replace(long, small)
    teacher = teacher.replace("  global_batch_size: 16", "  global_batch_size: 2\n  validation_max_samples: 2")
    (own / "short_quickstart.yaml").write_text(teacher, encoding="utf-8")
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "scheduler.warmup_steps=1", "logger=none")
    small = ("data.global_batch_size=2", "data.validation_max_samples=2", "objective.teacher_strategy=fsdp")
    words = ("experiment=distill_small", "run.starts_from=short_quickstart", "trainer.devices=2", *short, *small)
    folder = run_folder(mgpu(cache, tmp_path, *words))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["objective"] == "distill"
    assert summary["metrics"]["val/divergence"] > 0 and summary["metrics"]["val/loss"] > 0
    assert [sample["prompt"] for sample in summary["samples"]] == ["def ", "import ", "The "]
    (taught_by,) = (tmp_path / "outputs" / "quickstart").iterdir()
    kept = (folder / "config.yaml").read_text(encoding="utf-8")
    assert f"teacher: {taught_by}\n" in kept and "init_from: null" in kept
    again = mgpu(cache, tmp_path, "--config-path", str(folder), f"run.dir={folder}", "checkpoint.resume=auto")
    assert run_folder(again) == folder, "a run that is continued by its own configuration knows its teacher"
