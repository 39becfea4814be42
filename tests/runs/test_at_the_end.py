"""Runs whose end is not the usual one: killed after the last save, ended early, begun from a run of another shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.support import SHORT
from tests.support.command import column, environment, mgpu, run_folder
from tests.support.program import run_program

pytestmark = pytest.mark.slow

BASE = (
    *SHORT,
    "checkpoint.every_n_steps=1",
    "checkpoint.keep_last=0",
    "trainer.max_steps=4",
    "trainer.val_every_n_steps=2",
    "model.config.num_hidden_layers=2",
)


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(mgpu(cache, tmp_path_factory.mktemp("finished"), *BASE))


def state(folder: Path, step: int) -> dict[str, object]:
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


def test_a_checkpoint_is_ranked_by_its_own_evaluation_only(finished: Path) -> None:
    evaluated = column(finished, "val/loss")
    assert list(evaluated) == [2, 4]
    for step in range(1, 5):
        metrics = state(finished, step)["metrics"]
        assert isinstance(metrics, dict)
        assert metrics.get("val/loss") == evaluated.get(step)


def test_killed_between_the_last_save_and_the_summary(cache: Path, finished: Path) -> None:
    before = json.loads((finished / "summary.json").read_text())
    rows = (finished / "metrics.csv").read_bytes()
    (finished / "summary.json").unlink()
    more = (f"run.dir={finished}", "checkpoint.resume=auto", "objective.sample_prompts=[1 2 3]")
    mgpu(cache, finished, *BASE, *more)
    after = json.loads((finished / "summary.json").read_text())
    assert (after["status"], after["step"], after["checkpoint"]) == ("finished", 4, before["checkpoint"])
    assert after["metrics"]["val/loss"] == before["metrics"]["val/loss"]
    assert after["samples"][0]["text"]
    assert (finished / "metrics.csv").read_bytes() == rows


def test_weights_of_a_run_of_another_shape_are_refused(cache: Path, finished: Path, tmp_path: Path) -> None:
    said = mgpu(cache, tmp_path, *BASE, f"checkpoint.init_from={finished}", "model.config.num_hidden_layers=1", code=2)
    assert "is a checkpoint of another model: model.layers.1." in said
    assert "Traceback" not in said


def test_what_lightning_refuses_is_one_line(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import pytorch_lightning as pl\nfrom pytorch_lightning.utilities.exceptions import MisconfigurationException\n"
        "class Picky(pl.Callback):\n    def setup(self, trainer, pl_module, stage):\n"
        "        raise MisconfigurationException('not with this Trainer')\n"
    )
    said = mgpu(cache, tmp_path, *BASE, "+callbacks.x._target_=mine.Picky", code=2)
    assert "error: callbacks, logger: Lightning refuses this: not with this Trainer" in said
    assert "Traceback" not in said


def test_a_run_that_drops_says_that_its_parity_is_statistical(cache: Path, tmp_path: Path, finished: Path) -> None:
    words = ("trainer.max_steps=1", "model.config.attention_dropout=0.1", "checkpoint.save_last=false")
    done = run_program((*BASE[:6], *words), tmp_path, environment(cache), 300)
    assert done.returncode == 0 and "model.config.attention_dropout: drops at random" in done.stderr
    said = json.loads((run_folder(done.stdout) / "summary.json").read_text())["parity"]
    assert said == "statistical only: dropout draws different masks under each topology"
    assert "parity" not in json.loads((finished / "summary.json").read_text())
