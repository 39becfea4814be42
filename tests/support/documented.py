"""The commands that the README and the pages of ``docs/`` show, and how tests run them.

A block opens with its language, and a word that says more where there is something to say:

    ```bash                    commands, run in order
    ```bash several-machines   commands that need several machines: their configuration is checked
    ```yaml conf/a.yaml        (any language) a file of the reader's, written before the commands below it are run
    ```console                 ``$ command``, and below it what it prints
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.cli.verbs import verb_names
from tests.support.command import REPOSITORY
from tests.support.program import python, run_program

SHORT = ["data.seq_len=32", "data.validation_max_samples=8", "data.global_batch_size=8"]
ELSEWHERE = "several-machines"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word behind that, and the text."""

    language: str
    word: str
    text: str

    @property
    def commands(self) -> list[str]:
        return self.text.splitlines() if self.language == "bash" else []

    @property
    def is_file(self) -> bool:
        return self.language != "bash" and bool(self.word)

    @property
    def shown(self) -> list[tuple[str, str]]:
        """Each command of a console, and what is shown below it."""
        if self.language != "console":
            return []
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        return [(command, said) for command, _, said in (part.partition("\n") for part in parts)]


def blocks(page: Path) -> list[Block]:
    return [Block(*groups) for groups in BLOCK.findall(page.read_text(encoding="utf-8"))]


def overrides(command: str) -> list[str]:
    """The words for this program in a command line that starts it on several machines."""
    words = shlex.split(command)
    return words[next(at for at, word in enumerate(words) if word in ("mgpu_pipe", "mgpu-pipe")) + 1 :]


def run(command: str, cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, training made short; ``pip install`` goes into the folder ``site``."""
    program, *words = shlex.split(command)
    if program == "mgpu-pipe":
        trains = words[0] not in {*verb_names(), "--help"}
        if words[0] == "serve" and "--print" not in words:
            words += ["--port", "0", "--check"]
        short = SHORT[1:] if "objective=vision_language" in words else SHORT  # pictures have their places
        return run_program([*words, *(short if trains else [])], cwd, environment, 300)
    if program == "torchrun":
        arguments = ["-m", "torch.distributed.run", *words, *SHORT]
    elif program == "pip":
        assert words[0] == "install", command
        if not words[1].startswith("./"):  # an extra, which the tests have
            return subprocess.CompletedProcess(command, 0, "", "")
        (cwd / "site").mkdir(exist_ok=True)
        arguments = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            "site",
            words[1],
        ]
    else:
        assert program == "python", command
        return run_program(words, cwd, environment, 300, python)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pages() -> list[Path]:
    return sorted((REPOSITORY / "docs").rglob("*.md"))
