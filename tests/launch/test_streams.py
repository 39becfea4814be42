"""What reaches the terminal and the log, streams whose other end is gone, and the end of a process."""

from __future__ import annotations

import io
import os
import pty
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.launch.preparing import LiveStream, PlainLines
from tests.launch.launching import ROOT
from tests.support.command import REPOSITORY


def test_a_bar_that_is_redrawn_leaves_no_trace_in_the_log() -> None:
    plain = PlainLines()
    shown = "\x1b[?25l\r\x1b[2K\x1b[1m bar 10%\x1b[0m\r\x1b[2Ksaved step 5\n bar 20%\r\x1b[2K bar 100%\n\x1b[?25h"
    assert plain.feed(shown) == "saved step 5\n bar 100%\n"


def test_lines_are_kept_whole_however_the_text_is_cut() -> None:
    text = "".join(f"line {number}\n" for number in range(50))
    cuts = sorted(random.Random(0).sample(range(len(text)), 40))
    plain = PlainLines()
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(map(plain.feed, pieces)) == text


def test_the_launcher_gets_all_of_it_and_may_go_away() -> None:
    read_fd, write_fd = os.pipe()
    log = io.StringIO()
    stream = LiveStream(log, write_fd)
    stream.write("\x1b[1mone\x1b[0m\n")
    assert os.read(read_fd, 100) == b"\x1b[1mone\x1b[0m\n"
    os.close(read_fd)
    stream.write("two\n")  # nobody reads any more: the run goes on, the log too
    assert log.getvalue() == "one\ntwo\n"
    os.close(write_fd)


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


ENDING = """
import atexit, os, threading, time
from mgpu_pipe.system.process_end import exit_now

class Bomb:
    def __del__(self):
        os.abort()  # as torch.distributed's threads do now and then when the interpreter destroys their groups

bomb = Bomb()
atexit.register(lambda: print("hook ran"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
print("no newline at the end", end="")
exit_now(75)
"""


def test_hooks_run_threads_end_and_nothing_is_destroyed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=60
    )
    assert done.returncode == 75, done.stderr
    assert done.stdout == "no newline at the endthread ended\nhook ran\n"
