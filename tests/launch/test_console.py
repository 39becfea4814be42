"""Streams whose other end is gone: pipes without a reader, a terminal that was closed, a full disk."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import ROOT

PROGRAM = """
import sys
from mgpu_pipe.system.standard_streams import outliving_streams
with outliving_streams():
    sys.stdin.readline()
    for _ in range(3):
        print("a line" * 5000)
        print("progress", file=sys.stderr, flush=True)
    print("the last")
sys.exit(75)
"""


def ended(out: int, read_end: int) -> int:
    """Exit code of a program that prints to ``out`` after ``read_end`` was closed."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=out, stderr=out, env={"PYTHONPATH": str(ROOT)}
    )
    os.close(out)
    os.close(read_end)
    program.communicate(b"go\n", timeout=60)
    return program.returncode


def test_a_pipe_without_a_reader_costs_no_exit_code() -> None:
    read_end, write_end = os.pipe()
    assert ended(write_end, read_end) == 75


def test_nor_does_a_closed_terminal() -> None:
    ours, theirs = pty.openpty()
    assert ended(theirs, ours) == 75


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_nor_does_a_full_disk() -> None:
    assert ended(os.open("/dev/full", os.O_WRONLY), os.open("/dev/null", os.O_RDONLY)) == 75
