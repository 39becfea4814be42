"""``mgpu-pipe init``. Oracle: what it wrote runs, by the commands of its own README."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.cli.verbs.init import FILES
from tests.support.command import environment
from tests.support.program import run_program

SHORT = ["trainer.max_steps=2", "data.seq_len=32", "data.validation_max_samples=4", "objective.sample_prompts=[]"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "my_project"]) == 0
    assert "next: cd my_project && mgpu-pipe experiment=first" in capsys.readouterr().out
    return tmp_path / "my_project"


def test_it_is_whole_and_can_be_checked_at_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [file for file in project.rglob("*") if file.is_file()]
    assert len(files) == len(FILES) and not any("PROJECT" in file.read_text() for file in files)
    monkeypatch.chdir(project)
    assert cli.main(["check", "experiment=first"]) == 0
    assert "own conf    experiment=first (./conf)" in capsys.readouterr().out
    assert cli.main(["ls", "experiment"]) == 0
    assert (
        "learns to add, from this project's own data source (pip install --editable .). (./conf)"
        in capsys.readouterr().out
    )
    assert cli.main(["check", "experiment=sums"]) == 2  # its source is not installed here
    assert "sums" in capsys.readouterr().err


@pytest.mark.slow
def test_every_command_of_its_readme_runs(project: Path, cache: Path, tmp_path: Path) -> None:
    commands = re.findall(r"^((?:mgpu-pipe|pip) .*?)(?: +#.*)?$", (project / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 6
    site, known = tmp_path / "site", environment(cache)
    known["PYTHONPATH"] = os.pathsep.join([str(site), known["PYTHONPATH"]])
    for command in commands:
        program, *words = shlex.split(command)
        if program == "pip":
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
            subprocess.run([*install, "--target", site, project], check=True, capture_output=True)
            continue
        done = run_program([*words, *([] if words[0] in ("check", "ls") else SHORT)], project, known, 240)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "data.largest=20  a whole number. The largest number that is added." in done.stdout
    done = run_program(["check", "experiment=sums", "data.largst=3"], project, known, 60)
    assert "did you mean data.largest?" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["My-Project"], "use small letters, digits and _"),
        (["full"], "full: the folder is not empty"),
        (["file"], "file: the folder is not empty"),
        (["file/below"], "cannot be written"),
        ([], "the following arguments are required: FOLDER"),
    ],
)
def test_what_cannot_be_a_project_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    assert cli.main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]


def test_nothing_is_left_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = Path.write_text

    def write(path: Path, *args: str, **options: str) -> int:
        if path.name == "sums.yaml":
            raise OSError(28, "No space left on device")
        return whole(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", write)
    assert cli.main(["init", "mine"]) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
