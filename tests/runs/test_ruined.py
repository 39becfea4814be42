"""Runs whose weights a step ruined: what is saved, named, kept and taken. Oracle: the run that nothing ruined."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.support import SHORT, steps_of
from tests.support.command import column, mgpu, run_folder

pytestmark = pytest.mark.slow

BASE = (
    *SHORT,
    "checkpoint.every_n_steps=2",
    "checkpoint.keep_last=1",
    "trainer.max_steps=6",
    "model.config.num_hidden_layers=1",
    "trainer.accelerator=cpu",
    "precision=fp32",
    "checkpoint.resume=auto",
)
RUIN = "+callbacks.ruin._target_=tests.support.ruin.Ruin"


@pytest.fixture(scope="module")
def sound(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return run_folder(mgpu(cache, folder, *BASE, f"run.dir={folder / 'run'}"))


@pytest.mark.parametrize(
    ("value", "kept", "more"),
    [
        ("1e30", [2, 4], ("strategy=single", "checkpoint.async_save=false")),
        ("inf", [2], ("strategy=fsdp", "trainer.devices=2", "checkpoint.on_save_error=continue")),
    ],
)
def test_the_last_good_one_is_named_kept_and_gone_on_from(
    value: str, kept: list[int], more: tuple[str, ...], cache: Path, sound: Path, tmp_path: Path
) -> None:
    """Weights of 1e30 are saved, for they are finite: the next step tells."""
    folder = tmp_path / "run"
    command = (*BASE, *more, f"run.dir={folder}")
    said = mgpu(cache, tmp_path, *command, RUIN, "+callbacks.ruin.step=4", f"+callbacks.ruin.value={value}", code=1)
    assert "is not finite" in said and f"the last good checkpoint is {folder}/checkpoints/step-00000002" in said
    assert steps_of(folder) == kept
    listed = mgpu(cache, tmp_path, "checkpoints", str(folder)).splitlines()
    assert [line.split()[1] for line in listed if line.startswith("* ") and "whole" in line] == ["2"], listed
    mgpu(cache, tmp_path, *command)
    for name in ("train/loss", "train/grad_norm"):
        whole = column(sound, name)
        assert all(abs(found / whole[step] - 1) < 1e-5 for step, found in column(folder, name).items())
        assert list(column(folder, name)) == [1, 2, 3, 4, 5, 6]
    assert steps_of(folder) == [4, 6], "of the last no step has told"
    assert steps_of(sound) == [4, 6]
