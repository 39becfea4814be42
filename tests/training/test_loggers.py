"""Loggers: names, errors, and those of comet and trackio. Oracles: what stand-ins receive."""

from __future__ import annotations

import base64
import io
import json
import sqlite3
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, comet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from mgpu_pipe.checks.slots import logger_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.hydra.interpolation import EnvironmentText
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.import_path import allow_own_classes
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.loggers import log_metrics, log_samples, start_loggers
from tests.support.command import REPOSITORY
from tests.support.documented import blocks
from tests.support.needs import need_comet, need_mlflow, need_trackio, need_wandb

ALONE = ParallelDims()
SECRET = "s3cret-of-the-service"


class LibraryError(Exception):
    """No kind of ValueError."""


class Refusing(CSVLogger):
    def __init__(self, save_dir: str, address: str = "the service") -> None:
        super().__init__(save_dir)
        self.address = address

    @property
    def experiment(self):  # type: ignore[no-untyped-def]
        raise LibraryError(f"{self.address}\n  said no")


def test_what_its_library_raises_becomes_one_line(tmp_path: Path) -> None:
    config = RunConfig()
    config.run.root = str(tmp_path / "outputs")
    config.logger = {"mine": {"_target_": f"{__name__}.Refusing"}}
    with pytest.raises(ConfigError) as refused:
        start_loggers(config, tmp_path, ALONE)
    assert str(refused.value) == (
        f"logger.mine._target_={__name__}.Refusing: cannot be started (LibraryError: the service said no); "
        "correct logger.mine, or use logger=none"
    )


def test_a_value_of_the_environment_is_not_shown(tmp_path: Path) -> None:
    config = RunConfig()
    config.run.root = str(tmp_path / "outputs")
    address = EnvironmentText("http://user:secret@host", "${oc.env:ADDRESS}")
    config.logger = {"mine": {"_target_": f"{__name__}.Refusing", "address": address}}
    with pytest.raises(ConfigError, match=r"\(LibraryError: \$\{oc.env:ADDRESS\} said no\)"):
        start_loggers(config, tmp_path, ALONE)


def test_each_is_started_in_the_runs_folder(tmp_path: Path) -> None:
    config = RunConfig()
    config.run.root = str(tmp_path / "outputs")
    config.logger = {"csv": {"_target_": "pytorch_lightning.loggers.CSVLogger", "name": "x"}}
    (logger,) = start_loggers(config, tmp_path, ALONE)
    assert Path(str(logger.log_dir)).is_relative_to(tmp_path / "x")


def test_tensorboard_is_told_of_the_run_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDRESS", SECRET)
    config = described("tensorboard", tmp_path, "data.cache_dir=${oc.env:ADDRESS}")
    config.logger["mine"] = {"_target_": "pytorch_lightning.loggers.CSVLogger", "prefix": "x"}
    command = [
        "mgpu-pipe",
        "+logger.mine.api_key=" + SECRET,
        "logger.x.uri=https://me:pw@host",
        f"data.cache_dir={SECRET}",
    ]
    (tmp_path / "environment.json").write_text(json.dumps({"command": command}))
    loggers = start_loggers(config, tmp_path, ParallelDims(tp=2))
    log_samples(loggers, 4, SAMPLES)
    for logger in loggers:
        log_metrics(logger, {"val/recall@5": 0.5}, 4)
        logger.finalize("success")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    (given,) = [
        {key: value.string_value or value.number_value for key, value in start.hparams.items()}
        for data in [read.PluginTagToContent("hparams")["_hparams_/session_start_info"]]
        for start in [HParamsPluginData.FromString(data).session_start_info]
    ]
    assert (given["run.name"], given["optimizer.lr"]) == ("described", config.optimizer.lr)
    assert given["data.cache_dir"] == "${oc.env:ADDRESS}" and given["run.tags"] == '["paper"]'
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert "strategy: " in texts["run/tags/text_summary"] and "topology: tp=2" in texts["run/tags/text_summary"]
    assert "+logger.mine.api_key=*** logger.x.uri=https://***@host" in texts["run/command/text_summary"]
    assert "once upon" in texts["samples/text_summary"] and read.Scalars("val/recall@5")[0].value == 0.5
    assert read.Images("samples/1")[0].width == 2
    for file in tmp_path.rglob("*"):
        assert file.name == "environment.json" or file.is_dir() or SECRET.encode() not in file.read_bytes(), file
    assert not (tmp_path / "logger.json").exists(), "its files are the run's own"


@pytest.mark.slow
def test_a_resume_goes_on_in_the_same_mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_mlflow()
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"command": ["mgpu-pipe", "logger=mlflow"]}))
    for steps in (5, 10):
        config = described("mlflow", tmp_path, f"trainer.max_steps={steps}", f"run.root={tmp_path}")
        (logger,) = start_loggers(config, tmp_path, ALONE)
        log_metrics(logger, {"val/recall@5": 0.5, "train/loss": 1.0}, steps)
        log_samples([logger], steps, SAMPLES)
        logger.finalize("success")
    client = MlflowClient(config.logger["mlflow"]["tracking_uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("mgpu_pipe").experiment_id])
    kept = json.loads((tmp_path / "logger.json").read_text())
    assert kept["mlflow"]["id"] == run.info.run_id
    assert run.data.params["trainer.max_steps"] == "5" and run.data.tags["trainer.max_steps"] == "10"
    assert run.data.tags["mlflow.note.content"] == "mgpu-pipe logger=mlflow" and run.data.tags["run.tags"] == "paper"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "val/recall_at_5")] == [5, 10]
    names = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert "samples/step-00000005.txt" in names and "samples/step-00000010-1.png" in names
    assert not (tmp_path / "mlruns").exists(), "nothing in the working folder"
    client.delete_run(run.info.run_id)


def test_a_resume_goes_on_in_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_wandb()
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"command": ["mgpu-pipe", "logger=wandb"]}))
    ids = []
    for steps in (5, 10):
        config = described("wandb", tmp_path, f"trainer.max_steps={steps}")
        (logger,) = start_loggers(config, tmp_path, ALONE)
        run = logger.experiment  # type: ignore[attr-defined]
        assert run.config["trainer.max_steps"] == steps and run.notes == "mgpu-pipe logger=wandb"
        assert set(run.tags) == {"described", config.strategy.name, "1 process", "paper"}
        log_metrics(logger, {"val/recall@5": 0.5}, steps)
        log_samples([logger], steps, SAMPLES)
        ids.append(run.id)
        wandb.finish()
    assert ids[0] == ids[1] == json.loads((tmp_path / "logger.json").read_text())["wandb"]["id"]
    assert len(list(tmp_path.glob("wandb/**/media/images/pictures*.png"))) == 2


def test_a_damaged_logger_json_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "logger.json").write_text("{")
    with pytest.raises(BadInputError, match="remove it, and the loggers start new runs"):
        start_loggers(described("tensorboard", tmp_path), tmp_path, ALONE)


def described(logger: str, folder: Path, *overrides: str) -> RunConfig:
    words = [f"logger={logger}", "run.name=described", "run.tags=[paper]", "trainer.accelerator=cpu", *overrides]
    return compose(words)[0]


def picture() -> str:
    content = io.BytesIO()
    Image.new("L", (2, 3)).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


SAMPLES = [
    {"prompt": "once", "text": " upon\na time", "image": ""},
    {"prompt": "cat", "text": " → dog", "image": picture()},
]


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
    monkeypatch.setattr("mgpu_pipe.checks.slots.PACKAGES", {})
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
    monkeypatch.setattr("mgpu_pipe.checks.slots.PACKAGES", {"CometLogger": ("zipfile", "zipfile")})
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
