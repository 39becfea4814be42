"""A command that runs into ``ulimit -f`` says so in one line, wherever it writes."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

RUN = ("model=llama_tiny", "trainer.accelerator=cpu", "trainer.max_steps=1", "run.dir=run", "data.cache_dir=cache")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init", "project"), "mgpu-pipe init project: cannot be written (File too large)"),
        (("schema",), "file too large; raise the limit of the size of files (ulimit -f)"),
        (
            RUN,
            "run: its lock file cannot be written (File too large); raise the limit of the size of files (ulimit -f)",
        ),
    ],
    ids=["init", "schema", "train"],
)
def test_a_limit_of_the_size_of_files_is_a_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    command = [sys.executable, "-m", "mgpu_pipe", *words]
    with open(tmp_path / "shown", "wb") as shown:
        done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit, stdout=shown, stderr=subprocess.PIPE, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and said in line
