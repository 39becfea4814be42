"""Processes that work ahead: in order, with their errors, and nothing of them left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.errors import DataError, WorkerError
from tests.launch.launching import ROOT, alive, until


def doubler(size: int) -> Callable[[int], bytes]:
    """Results larger than a pipe, some of them late."""

    def work(item: int) -> bytes:
        if item == 3:
            time.sleep(0.3)
        if item == 99:
            raise DataError("item 99 is broken")
        if item == 98:
            os.kill(os.getpid(), signal.SIGKILL)
        return bytes([item]) * size

    return work


def test_results_come_in_order_whoever_is_late() -> None:
    found = work_in_order(range(9), 3, doubler, (300_000,), ahead=2, what="")
    assert [result[0] for result in found] == list(range(9))


def test_an_error_and_a_death_reach_the_caller() -> None:
    with pytest.raises(DataError, match="item 99"):
        list(work_in_order([1, 99], 2, doubler, (1,), ahead=2, what=""))
    with pytest.raises(WorkerError, match="use fewer"):
        list(work_in_order([1, 98], 2, doubler, (1,), ahead=2, what="it died: use fewer"))


KILLED = """
import os
from mgpu_pipe.data.ordered_work import work_in_order
from tests.data.test_ordered_work import doubler
if __name__ == "__main__":
    results = work_in_order(range(100), 2, doubler, (10,), ahead=2, what="")
    next(results)
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    input()
"""


def test_a_group_that_is_killed_together_leaves_no_process_and_nothing_in_shared_memory(tmp_path: Path) -> None:
    """SIGKILL to the whole group, also to the standard library's tracker that would have tidied up."""
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        env={"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2 and all(map(alive, children))
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (parent.pid, *children)]
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not any(map(alive, children)), "the end of all processes")
    assert all("/python" in text and "/dev/shm/" not in text for text in maps)  # nothing with a name there
