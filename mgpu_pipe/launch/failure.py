"""Finds the rank that failed first and formats its error."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    CheckpointSaveError,
    GradientSpikeError,
    MgpuError,
    NonFiniteError,
    WorkerError,
    conceal,
    one_line,
)
from mgpu_pipe.launch.workers import ERROR_FD, Exit, log_header
from mgpu_pipe.system.local_files import replace_file

TAIL_LINES = 25
MAX_LOG_BYTES = 65536
"""Bytes at the end of a log that are read."""
MAX_NAMED_RANKS = 4
"""Limit of hanging ranks in a message."""
MAX_MESSAGE = 4_000
MAX_TRACEBACK = 16_000
"""Limits in characters; message and traceback together fit into the 64 KiB of a pipe."""
NOT_RETRIED = (NonFiniteError.__name__, GradientSpikeError.__name__, CheckpointSaveError.__name__)
WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+).* ran for (\d+) milliseconds"
)
"""Log line of NCCL's watchdog before it ends the process."""
TIMEOUT_WORDS = ("timed out waiting", "wait timeout", "waited for")
"""Words in the error of a rank that waited for launch.collective_timeout seconds."""
STACK = "(most recent call first):\n"
RECORDED = ("type", "message", "traceback", "exit_code", "time", "follows")
"""Fields of a failure that its rank records (:func:`error_record`)."""
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
"""Words in torch.distributed's plain RuntimeErrors on ranks that survive a failed one."""


@dataclass(frozen=True)
class Failure:
    """A rank's end by an error.

    Attributes:
        time: seconds since the epoch.
        follows: whether it looks like a consequence of another rank's end.
    """

    rank: int
    type: str
    message: str
    traceback: str
    exit_code: int
    time: float
    follows: bool
    log: Path

    @property
    def can_be_retried(self) -> bool:
        """Whether a restart can help: not after wrong input, a NaN loss or a full disk."""
        return can_be_retried(self.type, self.exit_code)

    def show(self) -> str:
        """One line for an error with a fix; otherwise the end of the traceback, the rank and its log."""
        if not self.traceback and self.type != WorkerError.__name__:
            return f"error: {one_line(self.message)}"
        lines = self.traceback.rstrip().splitlines()
        tail = lines if len(lines) <= TAIL_LINES else ["  ...", *lines[-TAIL_LINES:]]
        return "\n".join([*tail, f"error: rank {self.rank} failed first: {one_line(self.message)} (log: {self.log})"])


def can_be_retried(kind: str, exit_code: int) -> bool:
    """Whether a restart can help after an error of the type ``kind``; see :attr:`Failure.can_be_retried`."""
    return exit_code != EXIT_BAD_INPUT and kind not in NOT_RETRIED


def error_record(error: BaseException, rank: int) -> dict[str, object]:
    """Record of an error for the launcher, with texts cut to the size of a pipe."""
    record: dict[str, object] = {
        "type": type(error).__name__,
        "message": conceal(str(error) or type(error).__name__)[:MAX_MESSAGE],
        "exit_code": EXIT_FAILURE,
        "rank": rank,
        "time": time.time(),
        "traceback": "",
        "follows": False,
    }
    if isinstance(error, MgpuError):
        return {**record, **json.loads(error.to_json()), "message": conceal(str(error))}
    trace = conceal("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    return {**record, "traceback": trace[-MAX_TRACEBACK:], "follows": follows_a_peers_end(error)}


def write_error(path: Path, error: BaseException, rank: int) -> None:
    """Write ``error`` for the launcher into a file, or into the pipe if the disk is full."""
    text = json.dumps(error_record(error, rank))
    try:
        replace_file(path, text)
    except OSError:
        if ERROR_FD in os.environ:
            os.write(int(os.environ[ERROR_FD]), text.encode())


def follows_a_peers_end(error: BaseException) -> bool:
    """Whether torch.distributed raised ``error`` because another rank is gone."""
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
    """The failure that caused the others: the earliest that is not a consequence.

    Args:
        exits: ends of the workers, at least one of them a failure.
        killed_by_us: ranks that the launcher killed.
        stood_still: ranks that were stopped (SIGSTOP) at the first failure.
    """
    failures = [
        _read_failure(paths, end, attempt)
        for end in exits
        if end.error or paths.rank_error(end.rank).exists() or not (end.code in (0, 75) or end.rank in killed_by_us)
    ]
    first = min(failures, key=lambda failure: (failure.follows, failure.time))
    if first.follows and stood_still:
        return _stopped_rank_failure(paths, min(stood_still), first)
    silent = killed_by_us - {failure.rank for failure in failures}
    if first.follows and silent and any(words in first.message.lower() for words in TIMEOUT_WORDS):
        return _silent_ranks_failure(paths, sorted(silent), first, attempt)
    return first


def _stopped_rank_failure(paths: RunPaths, rank: int, waited: Failure) -> Failure:
    """Failure of a stopped rank that the others waited for."""
    message = (
        f"the process was stopped (SIGSTOP, or a debugger) and the other ranks waited for it in vain; rank "
        f"{waited.rank} reports: {waited.message.splitlines()[0][:200]}"
    )
    return _without_record(paths, rank, message, waited.time)


def _silent_ranks_failure(paths: RunPaths, ranks: Sequence[int], waited: Failure, attempt: int) -> Failure:
    """Failure of ranks that another rank waited for, and that were silent until killed."""
    stacks = {rank: _stack(paths.rank_log(rank), attempt) for rank in ranks[:MAX_NAMED_RANKS]}
    where = ", ".join(f"{rank} (at {_place(stack[0])})" if stack else f"{rank}" for rank, stack in stacks.items())
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    message = (
        f"the others waited in vain for rank{'s' * (len(ranks) > 1)} {where}{more} to join a collective; rank "
        f"{waited.rank} reports: {waited.message.splitlines()[0][:200]}"
    )
    return _without_record(paths, ranks[0], message, waited.time, "\n".join(stacks[ranks[0]]))


def _stack(log: Path, attempt: int) -> list[str]:
    """Innermost frames of the last stack in a rank's log, that of its main thread."""
    _, marker, frames = _log_text(log, attempt).rpartition(STACK)
    lines = frames.splitlines() if marker else []
    return list(itertools.takewhile(lambda line: line.startswith("  File "), lines))[:TAIL_LINES]


def _place(frame: str) -> str:
    """``a.py:3, f`` for the frame ``File "a.py", line 3 in f``."""
    return frame.strip().removeprefix("File ").replace('", line ', ":").replace('"', "").replace(" in ", ", ")


def _read_failure(paths: RunPaths, end: Exit, attempt: int) -> Failure:
    """The failure that a rank recorded; without a record, what its exit code and the end of its log say."""
    log = paths.rank_log(end.rank)
    path = paths.rank_error(end.rank)
    text_record = path.read_text(encoding="utf-8") if path.exists() else end.error
    if text_record:
        record = json.loads(text_record)
        return Failure(end.rank, log=log, **{name: record[name] for name in RECORDED})
    tail = "\n".join(_log_text(log, attempt).rstrip().splitlines()[-TAIL_LINES:])
    message = f"ended with exit code {end.code}"
    if end.code < 0:
        message = f"killed by {_signal_name(-end.code)}"
        if end.code == -signal.SIGKILL:
            message += " (the kernel does that when memory runs out)"
    # NCCL's watchdog aborts the process from another thread, without an exception
    text = _log_text(log, attempt) if end.code == -signal.SIGABRT else ""
    follows = "processgroup" in text.lower()
    if hang := WATCHDOG.search(text):
        number, kind, waited_ms = hang.groups()
        message = f"waited for the others in {kind} number {number}, by NCCL, for {int(waited_ms) / 1000:.0f} s in vain"
        follows = True
    return _without_record(paths, end.rank, message, end.seen_at, tail, follows)


def _without_record(
    paths: RunPaths, rank: int, message: str, moment: float, trace: str = "", follows: bool = False
) -> Failure:
    """Failure of a rank that recorded no error."""
    return Failure(rank, WorkerError.__name__, message, trace, EXIT_FAILURE, moment, follows, paths.rank_log(rank))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _log_text(log: Path, attempt: int) -> str:
    """End of this attempt's part of a rank's log."""
    with log.open("rb") as file:
        file.seek(max(0, os.path.getsize(log) - MAX_LOG_BYTES))
        text = file.read().decode("utf-8", "replace")
    _, header, rest = text.rpartition(log_header(attempt))
    return rest.partition("\n")[2] if header else text
