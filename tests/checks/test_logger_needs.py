"""Loggers that cannot start are told by check. Stand-ins: modules of their names that are installed, or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.checks import slots as logger_needs
from mgpu_pipe.checks.values import relation_errors, value_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError

COMET = ("COMET_API_KEY", "COMET_CONFIG", "COMET_START_ONLINE")


def all_errors(config: RunConfig) -> list[BadInputError]:
    return [*value_errors(config), *relation_errors(config)]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """The modules that seem to be installed, on a machine without wandb's settings."""
    names: set[str] = set()

    class Finder:
        find_spec = staticmethod(lambda name: name if name in names else None)

    monkeypatch.setattr(logger_needs, "PathFinder", Finder)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "NETRC", *COMET):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return names


def said(*overrides: str) -> list[str]:
    return [str(error) for error in all_errors(compose(["trainer.accelerator=cpu", *overrides])[0])]


@pytest.mark.parametrize("target", ["WandbLogger", "wandb.WandbLogger"])
def test_a_missing_package_is_named_by_whatever_path(installed: set[str], target: str) -> None:
    (message,) = said("logger=wandb", f"logger.wandb._target_=pytorch_lightning.loggers.{target}")
    assert message.endswith("needs wandb, not installed here; pip install wandb")


def test_wandb_needs_a_key_or_to_be_offline(
    installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("wandb")
    (message,) = said("logger=wandb")
    assert "W&B has no key for its service; set WANDB_API_KEY, run wandb login, or write logger.wandb" in message
    assert said("logger=wandb", "logger.wandb.offline=true") == []
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x")
    assert said("logger=wandb") == []
    (tmp_path / ".netrc").unlink()
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "x")):
        with monkeypatch.context() as here:
            here.setenv(name, value)
            assert said("logger=wandb") == []


def test_comet_needs_a_key_or_to_be_offline(
    installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("comet_ml")
    comet = ("logger=none", "+logger.comet._target_=pytorch_lightning.loggers.CometLogger")
    (message,) = said(*comet)
    assert (
        "Comet has no key for its service; set COMET_API_KEY, run comet login, or set COMET_START_ONLINE=fa" in message
    )
    for name, value in (("COMET_API_KEY", "x"), ("COMET_START_ONLINE", "false")):
        with monkeypatch.context() as here:
            here.setenv(name, value)
            assert said(*comet) == []
    (tmp_path / "there").mkdir()
    for file in (tmp_path / ".comet.config", tmp_path / "there" / ".comet.config"):
        monkeypatch.setenv("COMET_CONFIG", str(tmp_path / "there"))
        file.write_text("[comet]\napi_key = x\n")
        assert said(*comet) == []
        file.unlink()
    assert len(said(*comet)) == 1


def test_mlflow_needs_a_database_or_a_server(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.add("mlflow")
    (message,) = said("logger=mlflow")
    assert "logger.mlflow.tracking_uri=sqlite:...: MLflow needs more for a database; pip install sqlalchemy" in message
    installed.update(("sqlalchemy", "alembic"))
    assert said("logger=mlflow") == []
    (message,) = said("logger=mlflow", "logger.mlflow.tracking_uri=mlruns")
    assert "MLflow no longer writes to folders; give a database or a server" in message
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    installed.difference_update(("sqlalchemy", "alembic"))
    assert said("logger=mlflow") == []
