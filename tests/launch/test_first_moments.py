"""A stop signal before a run began: exit code 75 and one line, from the program's first line on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.launch.signals import NOT_BEGUN, asks_for_a_run
from tests.launch.launching import ROOT, until


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, as the kernel knows it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_was_asked_for_is_stopped_in_one_line(number: signal.Signals, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "mgpu_pipe", "experiment=quickstart"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: catches(program.pid, signal.SIGHUP), "the program's own handler")
        program.send_signal(number)
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
    assert (program.returncode, out, err) == (75, "", f"{NOT_BEGUN}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["optimizer.lr=1"], True),
        (["train"], True),
        (["-m", "seed=1,2"], True),
        (["~optimizer.lr"], True),
        (["train", "--help"], False),
        (["--cfg", "job"], False),
        (["--cfg=job"], False),
        (["check", "seed=1"], False),
        (["export", "outputs/x=1"], False),
        (["--version"], False),
    ],
)
def test_which_commands_ask_for_a_run(words: list[str], asks: bool) -> None:
    assert asks_for_a_run(words) == asks
