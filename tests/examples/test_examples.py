"""The packages under ``examples/``, installed and used together: ls, check, train, eval, verify, resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import column, environment, run_folder
from tests.support.program import run_program

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "pyproject.toml").exists())
RUN = [
    *("data.source=counting", "data.longest_step=5", "data.seq_len=16", "data.global_batch_size=8"),
    *("objective.name=focal_loss", "objective.gamma=1.5", "objective.weight=0.5", "strategy=ddp"),
    *("strategy.engine=logged_mesh", "strategy.log_digits=3", "model=llama_tiny", "model.config.vocab_size=64"),
    *("model.config.num_hidden_layers=2", "trainer.accelerator=cpu", "trainer.max_steps=6"),
    *("scheduler.total_steps=8", "trainer.val_every_n_steps=3", "checkpoint.every_n_steps=3", "precision=fp32"),
    "logger=none",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the packages were installed."""
    site, copies = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("copies")
    sources = [str(shutil.copytree(EXAMPLES / name, copies / name)) for name in NAMES]
    assert len(sources) == 3
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*command, str(site), *sources], check=True, capture_output=True)
    return site


@pytest.fixture
def program(site: Path, cache: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        known = environment(cache)
        paths = os.pathsep.join([str(site), known["PYTHONPATH"]])
        done = run_program(list(words), tmp_path, {**known, "PYTHONPATH": paths}, 240)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_the_packages_train_are_evaluated_verified_and_resumed(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for group, name, key in (
        ("data", "counting", "longest_step=7  a whole number. The sequences"),
        ("objective", "focal_loss", "gamma=2.0  a number. How much less"),
        ("strategy", "logged_mesh", "log_digits=6  a whole number. Digits"),
    ):
        listed = program("ls", group).stdout
        assert f" {name} " in listed and f"    {group}.{key}" in listed
    properties = json.loads(program("schema").stdout)["properties"]
    assert properties["strategy"]["properties"]["log_digits"]["default"] == 6
    assert "counting" in program("check", *RUN, "trainer.devices=4").stdout
    wrong = ["objective.gama=1", "data.longest_stp=1", "strategy.log_digit=1"]
    said = program("check", *RUN, *wrong, code=2).stderr
    for key, meant in zip(wrong, ("objective.gamma", "data.longest_step", "strategy.log_digits"), strict=True):
        assert f"{key}: no such key; did you mean {meant}?" in said
    said = program("check", *RUN, "objective.gamma=-1", "data.longest_step=0", "strategy.log_digits=18", code=2).stderr
    for told in ("objective.gamma=-1.0: use a number of at least 0", "data.longest_step=0: use a number of at least 1"):
        assert told in said
    assert "strategy.log_digits=18: use a number of at most 17" in said
    said = program("check", *RUN, "strategy.engine=mesh", code=2).stderr
    assert "strategy.log_digits=3: no such key here; leave it out, or choose logged_mesh" in said

    folder = tmp_path / run_folder(program(*RUN, "trainer.devices=4").stdout)
    log = (folder / "logs" / "rank-3.log").read_text()
    norm = column(folder, "train/grad_norm")[6]
    assert f"step 6: gradient norm {norm:.3f}\n" in log
    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    assert 0 <= metrics["val/token_accuracy"] <= 1
    shown = program("eval", str(folder)).stdout
    assert "token_accuracy  " in shown and "perplexity" not in shown

    on_one = [word for word in RUN if "log_digits" not in word]
    on_one += ["strategy=single", "strategy.engine=mesh", "trainer.max_steps=8"]
    one = tmp_path / run_folder(program(*on_one).stdout)
    more = program(*RUN, f"checkpoint.resume={folder}", "trainer.devices=2", "trainer.max_steps=8")
    resumed = tmp_path / run_folder(more.stdout)
    for step in (7, 8):
        assert column(resumed, "train/loss")[step] == pytest.approx(column(one, "train/loss")[step], rel=1e-5)
    assert "certificate:" in program("verify", *RUN, "trainer.devices=2").stdout
