"""A logger whose service refuses it is one line before training, whatever its library raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytorch_lightning.loggers import CSVLogger

from mgpu_pipe.config.interpolation import EnvironmentText
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.training.loggers import start_loggers


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
        start_loggers(config, tmp_path)
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
        start_loggers(config, tmp_path)


def test_each_is_started_in_the_runs_folder(tmp_path: Path) -> None:
    config = RunConfig()
    config.run.root = str(tmp_path / "outputs")
    config.logger = {"csv": {"_target_": "pytorch_lightning.loggers.CSVLogger", "name": "x"}}
    (logger,) = start_loggers(config, tmp_path)
    assert Path(str(logger.log_dir)).is_relative_to(tmp_path / "x")
