"""Which error is taken for the cause, and how it travels to the launcher."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import CheckpointSaveError, ConfigError
from mgpu_pipe.launch.failure import error_record, first_failure, follows_a_peers_end, write_error
from mgpu_pipe.launch.workers import Exit, open_log


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    found.logs.mkdir()
    for rank in range(3):
        open_log(found.rank_log(rank), rank, 3, 1).close()
    return found


def test_a_rank_that_died_before_the_others_complained_is_the_cause(paths: RunPaths) -> None:
    write_error(paths.rank_error(0), RuntimeError("Connection closed by peer [127.0.0.1]:1"), 0)
    write_error(paths.rank_error(2), RuntimeError("[enforce fail] gloo: Connection reset by peer"), 2)
    ends = [Exit(0, 1, time.time()), Exit(1, -11, time.time() + 5), Exit(2, 1, time.time())]
    failure = first_failure(paths, ends, 1, frozenset())
    assert (failure.rank, failure.message) == (1, "killed by SIGSEGV")


def test_of_several_causes_the_first_in_time_is_shown(paths: RunPaths) -> None:
    for rank in (2, 0, 1):
        write_error(paths.rank_error(rank), ValueError(f"rank {rank}"), rank)
        time.sleep(0.002)
    assert first_failure(paths, [Exit(rank, 1, 0.0) for rank in range(3)], 1, frozenset()).rank == 2


def test_ranks_that_the_launcher_killed_are_no_cause(paths: RunPaths) -> None:
    write_error(paths.rank_error(1), ValueError("defect"), 1)
    ends = [Exit(0, -9, 0.0), Exit(1, 1, time.time()), Exit(2, -15, 0.0)]
    assert first_failure(paths, ends, 1, frozenset({0, 2})).rank == 1


def test_running_out_of_memory_is_never_a_consequence() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch names its own."""

    assert not follows_a_peers_end(OutOfMemoryError("CUDA out of memory while NCCL was active"))
    assert follows_a_peers_end(RuntimeError("NCCL communicator was aborted"))
    assert not follows_a_peers_end(ValueError("barrier to entry"))


def test_the_tail_of_the_log_stands_in_for_a_missing_error(paths: RunPaths) -> None:
    with open_log(paths.rank_log(0), 0, 1, 2) as log:
        log.write(b"Fatal Python error: Segmentation fault\n")
    failure = first_failure(paths, [Exit(0, -11, 0.0)], 2, frozenset())
    assert "Segmentation fault" in failure.show()
    assert "attempt 1" not in failure.show()
    assert str(paths.rank_log(0)) in failure.show()


WATCHDOG = (
    "[rank{}]:[E1123 ProcessGroupNCCL.cpp:683] [Rank {}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600059 milliseconds "
    "before timing out.\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)


def test_an_abort_by_nccls_watchdog_is_a_hang(paths: RunPaths) -> None:
    for rank in (0, 2):
        with open_log(paths.rank_log(rank), rank, 3, 1) as log:
            log.write((WATCHDOG.format(rank, rank) + "frame\n" * 100).encode())
    with paths.rank_log(1).open("a") as log:
        log.write('Thread 0x7f (most recent call first):\n  File "b.py", line 1 in wait\n\n')
        log.write('Current thread 0x7e (most recent call first):\n  File "a.py", line 3 in f\n')
    ends = [Exit(0, -6, 1.0), Exit(1, -9, 2.0), Exit(2, -6, 1.1)]
    message = first_failure(paths, ends, 1, frozenset({1})).message
    assert message.startswith(
        "the others waited in vain for rank 1 (at a.py:3, f) to join a collective; rank 0 reports: "
    )
    assert message.endswith("waited for the others in ALLREDUCE number 12, by NCCL, for 600 s in vain")
    everywhere = first_failure(paths, [ends[0], ends[2]], 1, frozenset())
    assert (everywhere.rank, everywhere.message) == (0, message.partition("reports: ")[2]), "all waited"


def test_on_a_full_disk_the_error_goes_through_the_pipe(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv("MGPU_ERROR_FD", str(write_fd))
    write_error(Path("/dev/full/rank-0.error.json"), CheckpointSaveError("no space left"), 0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        end = Exit(0, 1, 0.0, pipe.read())
    failure = first_failure(paths, [end], 1, frozenset())
    assert failure.show() == "error: no space left"
    assert (failure.exit_code, failure.can_be_retried) == (1, False)


def test_an_error_fits_into_a_pipe() -> None:
    record = error_record(ValueError("ä" * 1_000_000), 0)
    assert len(str(record).encode()) < 65536


def test_input_errors_keep_their_exit_code(paths: RunPaths) -> None:
    write_error(paths.rank_error(0), ConfigError("a.b", 1, "use 2"), 0)
    failure = first_failure(paths, [Exit(0, 2, 0.0)], 1, frozenset())
    assert (failure.show(), failure.exit_code, failure.can_be_retried) == ("error: a.b=1: use 2", 2, False)
