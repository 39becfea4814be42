"""What loggers are told of a run; one whose service refuses it is one line before training. Oracles: the libraries' own
readers of what they wrote."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from pytorch_lightning.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.hydra.interpolation import EnvironmentText
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.loggers import log_metrics, log_samples, start_loggers
from tests.support.needs import need_mlflow, need_wandb

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


SAMPLES = [{"prompt": "once", "text": " upon\na time"}, {"prompt": "cat", "text": " → dog", "image": picture()}]
