"""Run folders made by an earlier version: they resume, are evaluated, reported and exported.

``make.py`` made them and wrote down what the same run, not interrupted, computed in its last two steps.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.config.freeze import remember
from mgpu_pipe.config.plugins import accept_old_modules
from tests.examples.test_examples import RUN
from tests.old_runs.make import (
    ADAPTERS,
    ALL,
    EXPECTED,
    HERE,
    INPUTS,
    OBJECTIVES,
    RUNS,
    STEPS,
    STOP,
    command,
    move_sweep,
)
from tests.support.command import REPOSITORY, column, environment, mgpu
from tests.support.program import run_program

TRUTH = json.loads(EXPECTED.read_text(encoding="utf-8"))
BOUND = 1e-4
"""Relative: another processor rounds sums in another order, and a step with Adam enlarges that."""
SAMPLED = ("causal_lm", "contrastive", "muon", "lora", "speech_seq2seq")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copytree(INPUTS, tmp_path / "inputs")
    shutil.copytree(RUNS, tmp_path / "runs")
    return tmp_path


def test_every_run_is_there() -> None:
    assert set(TRUTH) == set(ALL) == {folder.name for folder in RUNS.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.exhaustive) for name in ALL]
)
def test_a_run_resumes(cache: Path, place: Path, name: str) -> None:
    mgpu(cache, place, *command(name, STEPS, f"runs/{name}"), "checkpoint.resume=auto")
    for key, rows in TRUTH[name].items():
        steps = column(place / "runs" / name, key)
        assert rows and min(map(int, rows)) > STOP
        for step, value in rows.items():
            assert math.isclose(steps[int(step)], value, rel_tol=BOUND), (key, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.exhaustive) for name in ALL]
)
def test_a_run_is_evaluated_reported_and_exported(
    cache: Path, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = f"runs/{name}"
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(cache))
    remember(place / run / "config.yaml")  # as the launch did: a stranger's run may name no files
    summary = json.loads((place / run / "summary.json").read_text(encoding="utf-8"))
    base = ("--frozen-weights", "inputs/model") if name in ADAPTERS else ()
    evaluated = mgpu(cache, place, "eval", run, *base)
    assert "loss" in evaluated and summary["metrics"]["val/loss"] > 0
    mgpu(cache, place, "report", run)
    assert (place / run / "report.html").is_file()
    words = ("--merge", *base) if name in ADAPTERS else ()
    mgpu(cache, place, "export", run, "--out", f"out-{name}", *words)
    assert (place / f"out-{name}" / "model.safetensors").is_file()


def test_a_strangers_run_of_pictures_asks_for_no_tokenizer(tmp_path: Path, place: Path) -> None:
    assert "nats a sample" in mgpu(tmp_path / "cache", place, "eval", "runs/image_classification")


LATER = {"cpo", "kto", "reranker", "reward", "orpo", "simpo", "sound_classification"} | {
    *("sound_contrastive", "sound_tagging", "text_embedding", "text_similarity")
}
"""Objectives that the version of these runs did not have."""


def test_objectives_are_all_of_the_program() -> None:
    shipped = {file.stem for file in (REPOSITORY / "conf" / "objective").glob("*.yaml")}
    assert set(OBJECTIVES) == shipped - LATER


@pytest.mark.slow
def test_a_sweep_is_shown_and_extended(cache: Path, place: Path) -> None:
    shutil.copytree(HERE / "sweep", place / "outputs")
    move_sweep(place / "outputs" / "sweeps" / "rates", "/gone/place", str(place))
    assert "finished" in mgpu(cache, place, "sweeps", "list")
    shown = mgpu(cache, place, "sweeps", "show", "rates")
    assert "0.001" in shown and "0.0003" in shown
    assert "optimizer.lr=" in mgpu(cache, place, "sweeps", "best", "rates")
    mgpu(cache, place, "sweeps", "extend", "rates", "optimizer.lr=2e-3", "--trust")
    assert "0.002" in mgpu(cache, place, "sweeps", "show", "rates")


def test_a_job_names_a_module_that_starts(tmp_path: Path) -> None:
    """A job that waits in the queue names the file and the module of the version that submitted it."""
    (line,) = (line for line in (HERE / "job.sh").read_text(encoding="utf-8").splitlines() if "srun" in line)
    _, file, module, _ = shlex.split(line)[-4:]
    program = REPOSITORY / Path(file).relative_to("/gone")
    command = [sys.executable, "-P", str(program), module, str(tmp_path / "missing")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert f"{tmp_path}/missing" in done.stderr and "No module" not in done.stderr


def test_packages_import_what_they_name() -> None:
    """The packages that users wrote for the earlier version find the modules and names that they import."""
    accept_old_modules()
    for file in (HERE / "packages").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mgpu_pipe"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), (file.name, node.module)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_packages_train(cache: Path, tmp_path: Path) -> None:
    """They are installed as a user installs them, and used together."""
    site, copies = tmp_path / "site", shutil.copytree(HERE / "packages", tmp_path / "copies")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*install, str(site), *map(str, sorted(copies.iterdir()))], check=True, capture_output=True)
    known = environment(cache)
    paths = os.pathsep.join([str(site), known["PYTHONPATH"]])
    words = [*RUN, "trainer.devices=2", "run.dir=trained"]
    done = run_program(words, tmp_path, {**known, "PYTHONPATH": paths}, 240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(column(tmp_path / "trained", "train/loss")) == set(range(1, 7))
