"""A newcomer's wrong commands: one line that says what to type instead, exit code 2, and nothing is left behind.

How long they take is measured by ``python -m benchmarks.commands.wrong_commands``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from tests.newcomer.folder import WrongCommand, make_folder, wrong_commands
from tests.support.sampling import one_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("newcomer")
    make_folder(made)
    return made


def test_there_are_enough_and_none_twice() -> None:
    typed = [command.typed for command in wrong_commands()]
    assert len(typed) == len(set(typed)) >= 400


@pytest.mark.parametrize("command", one_in(20, wrong_commands()), ids=lambda command: command.typed)
def test_a_wrong_command_is_one_line(
    command: WrongCommand, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(cache))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("NOSUCH_VARIABLE", raising=False)
    before = {path.name for path in folder.iterdir()}
    code = cli.main(command.words)
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), (command.typed, out, err)
    assert err.startswith("error: ") and command.answer in err and len(err) < 2000, (command.typed, err)
    assert {path.name for path in folder.iterdir()} == before and not list((folder / "outputs").iterdir())
