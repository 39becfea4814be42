"""Runs in Comet and Trackio, set up as docs/guides/logging.md says. Oracles: what the packages wrote, where they are
installed; else what a stand-in for them was given."""

from __future__ import annotations

import json
import sqlite3
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import comet

from mgpu_pipe.checks.lightning_needs import logger_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.import_path import allow_own_classes
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.loggers import log_metrics, start_loggers
from tests.support.command import REPOSITORY
from tests.support.documented import blocks
from tests.support.needs import need_comet, need_trackio


class Recorder:
    """Keeps every call with its arguments."""

    def __init__(self, **known: object) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.append((name, args, options))

    def given(self, name: str) -> list[tuple[Any, ...]]:
        return [(*args, options) for called, args, options in self.calls if called == name]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with the files that the page shows."""
    for block in blocks(REPOSITORY / "docs" / "guides" / "logging.md"):
        if block.is_file:
            file = tmp_path / block.word
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "trackio_logger", raising=False)


def log(name: str, folder: Path, *overrides: str) -> None:
    """Log two steps as a run does."""
    words = [f"logger={name}", "run.name=shown", "trainer.accelerator=cpu", f"run.root={folder}", *overrides]
    allow_own_classes()
    loggers = start_loggers(compose(words)[0], folder, ParallelDims())
    for step in (1, 2):
        for logger in loggers:
            log_metrics(logger, {"train/loss": 3.0 / step}, step)
    for logger in loggers:
        logger.finalize("success")


def test_comet_gets_the_configuration_and_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Recorder(project_name="mgpu_pipe", get_key=lambda: "key")
    module = types.ModuleType("comet_ml")
    started: dict[str, Any] = {}
    module.ExperimentConfig = lambda **options: options  # type: ignore[attr-defined]
    module.start = lambda **options: started.update(options) or experiment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    monkeypatch.setattr(comet, "_COMET_AVAILABLE", True)
    monkeypatch.setattr("mgpu_pipe.checks.lightning_needs.PACKAGES", {})
    log("comet", tmp_path)
    assert (started["project"], started["online"], started["experiment_config"]["name"]) == ("mgpu_pipe", None, "shown")
    (parameters,) = experiment.given("__internal_api__log_parameters__")
    assert parameters[-1]["parameters"]["run.name"] == "shown"
    metrics = experiment.given("__internal_api__log_metrics__")
    assert [call[0]["train/loss"] for call in metrics] == [3.0, 1.5]


def test_comet_writes_an_archive_without_its_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_comet()
    import comet_ml

    monkeypatch.setenv("COMET_START_ONLINE", "false")
    log("comet", tmp_path)
    comet_ml.get_running_experiment().end()  # as a process does at its end
    (archive,) = tmp_path.rglob("*.zip")
    with zipfile.ZipFile(archive) as file:
        text = "".join(file.read(name).decode(errors="replace") for name in file.namelist())
    assert "train/loss" in text and "shown" in text


def test_comet_that_logs_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu_pipe.checks.lightning_needs.PACKAGES", {"CometLogger": ("zipfile", "zipfile")})
    leaf = {"_target_": "pytorch_lightning.loggers.CometLogger", "online": False}
    (error,) = logger_errors(leaf, "logger.comet")
    assert str(error).startswith("logger.comet.online=false: Lightning then logs nothing to Comet; leave it out, and")


def test_trackio_gets_the_configuration_and_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorder(project="mgpu_pipe", name="shown", config={})
    module = types.ModuleType("trackio")
    started: dict[str, Any] = {}
    module.init = lambda **options: started.update(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    log("trackio", tmp_path)
    assert started == {"project": "mgpu_pipe", "name": "shown", "resume": "allow", "embed": False}
    assert run.config["run.name"] == "shown"
    assert run.given("log") == [({"train/loss": 3.0}, {"step": 1}), ({"train/loss": 1.5}, {"step": 2})]
    assert len(run.given("finish")) == 1


def test_trackio_keeps_a_run_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_trackio()
    trackio_utils = pytest.importorskip("trackio.utils", reason="runs of Trackio need it: pip install trackio")
    storage = pytest.importorskip("trackio.sqlite_storage", reason="runs of Trackio need it: pip install trackio")
    for module in (trackio_utils, storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    log("trackio", tmp_path)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as kept:
        rows = [json.loads(row[0]) for row in kept.execute("SELECT metrics FROM metrics ORDER BY step")]
    assert [row["train/loss"] for row in rows] == [3.0, 1.5]
