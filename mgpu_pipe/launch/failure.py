"""Which rank failed first, and how its error is shown."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    CheckpointSaveError,
    GradientSpikeError,
    MgpuError,
    NonFiniteError,
    WorkerError,
    concealed,
)
from mgpu_pipe.launch.workers import ERROR_FD, Exit, log_header

TAIL_LINES = 25
LONGEST_MESSAGE = 4_000
LONGEST_TRACEBACK = 16_000
"""In characters; message and traceback together stay below the 64 KiB that a pipe holds."""
NOT_RETRIED = (NonFiniteError.__name__, GradientSpikeError.__name__, CheckpointSaveError.__name__)
FOLLOWS_A_PEERS_END = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "timed out waiting",
    "socket timeout",
    "wait timeout",
    "gloo",
    "nccl",
    "tcpstore",
    "barrier",
)
"""What torch.distributed says on the ranks that outlive a failed one; its exceptions are plain RuntimeErrors."""


@dataclass(frozen=True)
class Failure:
    """One rank's end by an error.

    Attributes:
        at: seconds since the epoch.
        follows: whether it looks like the consequence of another rank's end.
    """

    rank: int
    type: str
    message: str
    traceback: str
    exit_code: int
    at: float
    follows: bool
    log: Path

    @property
    def can_be_retried(self) -> bool:
        """Whether a restart can help: not where the input is wrong, the loss became NaN, or the disk is full."""
        return can_be_retried(self.type, self.exit_code)

    def show(self) -> str:
        """One line for an error that names its fix; else the traceback's end, the rank and its log."""
        if not self.traceback and self.type != WorkerError.__name__:
            return f"error: {self.message}"
        lines = self.traceback.rstrip().splitlines()
        tail = lines if len(lines) <= TAIL_LINES else ["  ...", *lines[-TAIL_LINES:]]
        return "\n".join([*tail, f"error: rank {self.rank} failed first: {self.message} (log: {self.log})"])


def can_be_retried(kind: str, exit_code: int) -> bool:
    """Of an error of the type ``kind``, as :attr:`Failure.can_be_retried`."""
    return exit_code != EXIT_BAD_INPUT and kind not in NOT_RETRIED


def error_record(error: BaseException, rank: int) -> dict[str, object]:
    """The record of an error for the launcher, its texts cut to what a pipe takes at once."""
    record: dict[str, object] = {
        "type": type(error).__name__,
        "message": concealed(str(error) or type(error).__name__)[:LONGEST_MESSAGE],
        "exit_code": EXIT_FAILURE,
        "rank": rank,
        "time": time.time(),
        "traceback": "",
        "follows": False,
    }
    if isinstance(error, MgpuError):
        return {**record, **json.loads(error.to_json()), "message": concealed(str(error))}
    trace = concealed("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    return {**record, "traceback": trace[-LONGEST_TRACEBACK:], "follows": follows_a_peers_end(error)}


def write_error(path: Path, error: BaseException, rank: int) -> None:
    """Leave ``error`` for the launcher: in a file, or, where the disk is full, in the pipe to it."""
    text = json.dumps(error_record(error, rank))
    try:
        replace_file(path, text)
    except OSError:
        if ERROR_FD in os.environ:
            os.write(int(os.environ[ERROR_FD]), text.encode())


def follows_a_peers_end(error: BaseException) -> bool:
    """Whether ``error`` is what torch.distributed raises where another rank is gone."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in names or not isinstance(error, (RuntimeError, OSError)):
        return False
    text = str(error).lower()
    return "DistError" in names or any(sign in text for sign in FOLLOWS_A_PEERS_END)


def first_failure(
    paths: RunPaths,
    exits: Iterable[Exit],
    attempt: int,
    killed_by_us: frozenset[int],
    stood_still: frozenset[int] = frozenset(),
) -> Failure:
    """The failure that the others follow from: the earliest that is not itself a consequence.

    Args:
        exits: how the workers ended; at least one of them not well.
        killed_by_us: ranks that the launcher ended by a signal.
        stood_still: ranks that were stopped (SIGSTOP) when the first other one failed.
    """
    failures = [
        _read(paths, end, attempt)
        for end in exits
        if end.error or paths.rank_error(end.rank).exists() or not (end.code in (0, 75) or end.rank in killed_by_us)
    ]
    first = min(failures, key=lambda failure: (failure.follows, failure.at))
    return _of_a_stopped_rank(paths, min(stood_still), first) if first.follows and stood_still else first


def _of_a_stopped_rank(paths: RunPaths, rank: int, waited: Failure) -> Failure:
    """The failure of a rank that stood still while the others waited for it."""
    message = (
        f"the process was stopped (SIGSTOP, or a debugger) and the other ranks waited for it in vain; rank "
        f"{waited.rank} said: {waited.message.splitlines()[0][:200]}"
    )
    return Failure(
        rank=rank,
        type=WorkerError.__name__,
        message=message,
        traceback="",
        exit_code=EXIT_FAILURE,
        at=waited.at,
        follows=False,
        log=paths.rank_log(rank),
    )


def _read(paths: RunPaths, end: Exit, attempt: int) -> Failure:
    log = paths.rank_log(end.rank)
    path = paths.rank_error(end.rank)
    told = path.read_text(encoding="utf-8") if path.exists() else end.error
    if told:
        record = json.loads(told)
        return Failure(
            rank=end.rank,
            type=record["type"],
            message=record["message"],
            traceback=record["traceback"],
            exit_code=record["exit_code"],
            at=record["time"],
            follows=record["follows"],
            log=log,
        )
    tail = log_tail(log, attempt)
    message = f"ended with exit code {end.code}"
    if end.code < 0:
        message = f"killed by {_signal_name(-end.code)}"
        if end.code == -signal.SIGKILL:
            message += " (the kernel does that when memory runs out)"
    # NCCL's watchdog aborts the process from a thread of its own, so that no exception is left
    follows = end.code == -signal.SIGABRT and "processgroup" in tail.lower()
    return Failure(
        rank=end.rank,
        type=WorkerError.__name__,
        message=message,
        traceback=tail,
        exit_code=EXIT_FAILURE,
        at=end.seen_at,
        follows=follows,
        log=log,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(log: Path, attempt: int, longest: int = 65536) -> str:
    """The last lines of this attempt's part of a rank's log."""
    with log.open("rb") as file:
        file.seek(max(0, os.path.getsize(log) - longest))
        text = file.read().decode("utf-8", "replace")
    _, header, rest = text.rpartition(log_header(attempt))
    if header:
        text = rest.partition("\n")[2]
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
