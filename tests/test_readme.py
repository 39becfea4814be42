"""Every command in the README runs as written; training is cut short by what is appended."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import REPOSITORY, environment
from tests.support.documented import SHORT, blocks, run
from tests.support.program import python, run_program
from tests.support.sampling import sampled

pytestmark = pytest.mark.slow

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [command for block in blocks(REPOSITORY / "README.md") for command in block.commands]
TRIED_ELSEWHERE = ("torchrun ", "mgpu-pipe doctor ", "mgpu-pipe serve ", "mgpu-pipe -m ")
"""``make test`` tries these in tests/launch, tests/commands, tests/serving and tests/sweep."""
BEFORE_SERVE = ("mgpu-pipe model=llama_tiny trainer.max_steps=20", "mgpu-pipe export --out exported")
"""Make the folder that ``serve`` opens, where ``-m exhaustive`` leaves out the commands above it."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder with the corpus that the README speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(corpus, folder / "corpus" / "part")
    return folder


def test_the_readme_tells_how_to_train_and_test() -> None:
    assert {"make train", "make test"} <= set(COMMANDS)
    assert len(COMMANDS) > 15
    assert set(BEFORE_SERVE) <= set(COMMANDS)


@pytest.mark.parametrize(
    "command",
    sampled(
        [(line,) for line in COMMANDS if not line.startswith("make ")],
        lambda line: not line.startswith(TRIED_ELSEWHERE),
    ),
)
def test_command(command: str, workplace: Path, cache: Path) -> None:
    is_alone = command.startswith("mgpu-pipe serve ") and not (workplace / "exported").exists()
    for line in [*(BEFORE_SERVE if is_alone else ()), command]:
        done = run(line, workplace, environment(cache))
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_python_that_the_readme_shows(workplace: Path, cache: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    whole, short = '"trainer.max_steps=20"', ", ".join(map(repr, ["trainer.max_steps=2", *SHORT]))
    assert program.count(whole) == 1
    (workplace / "program.py").write_text(program.replace(whole, short))
    done = run_program(["program.py"], workplace, environment(cache), 300, python)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "strategy    ddp, 2 CPU processes" in done.stdout and "step 2/2 (100%)" in done.stderr


def test_the_refusal_that_the_readme_shows() -> None:
    shown = re.search(r"^\$ mgpu-pipe (.*)\n(error: .*)$", README, re.MULTILINE)
    assert shown is not None
    done = subprocess.run(
        [sys.executable, "-m", "mgpu_pipe", *shlex.split(shown[1])],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (2, shown[2])


def test_make_train_runs_the_quickstart(tmp_path: Path, cache: Path) -> None:
    """``make train`` in a copy of the tree, with this environment in the place of the one it would install."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    program = tools / "mgpu-pipe"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mgpu_pipe "$@"\n')
    program.chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    short = [*SHORT, "model=llama_tiny", "trainer.max_steps=2", "scheduler.warmup_steps=1", "precision=bf16"]
    done = subprocess.run(
        ["make", "train", f"OVERRIDES={' '.join(short)}"],
        cwd=tmp_path,
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for word in ("perplexity", "unigram", "bits a byte", "report.html", "generate", "export", "def "):
        assert word in done.stdout
