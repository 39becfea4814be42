"""Which rank failed first, and how its error is shown."""

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
MOST_NAMED = 4
"""Of the ranks that hang."""
LONGEST_MESSAGE = 4_000
LONGEST_TRACEBACK = 16_000
"""In characters; message and traceback together stay below the 64 KiB that a pipe holds."""
NOT_RETRIED = (NonFiniteError.__name__, GradientSpikeError.__name__, CheckpointSaveError.__name__)
WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+).* ran for (\d+) milliseconds"
)
"""What NCCL's watchdog logs before it ends the process."""
IN_VAIN = ("timed out waiting", "wait timeout", "waited for")
"""What is said on a rank that waited for another one as long as launch.collective_timeout."""
STACK = "(most recent call first):\n"
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
    if first.follows and stood_still:
        return _of_a_stopped_rank(paths, min(stood_still), first)
    silent = killed_by_us - {failure.rank for failure in failures}
    if first.follows and silent and any(words in first.message.lower() for words in IN_VAIN):
        return _of_silent_ranks(paths, sorted(silent), first, attempt)
    return first


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


def _of_silent_ranks(paths: RunPaths, ranks: Sequence[int], waited: Failure, attempt: int) -> Failure:
    """The failure of ranks that another one waited for, and that said nothing until they were killed."""
    stacks = {rank: _stack(paths.rank_log(rank), attempt) for rank in ranks[:MOST_NAMED]}
    where = ", ".join(f"{rank} (at {_place(stack[0])})" if stack else f"{rank}" for rank, stack in stacks.items())
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    message = (
        f"the others waited in vain for rank{'s' * (len(ranks) > 1)} {where}{more} to join a collective; rank "
        f"{waited.rank} said: {waited.message.splitlines()[0][:200]}"
    )
    return Failure(
        rank=ranks[0],
        type=WorkerError.__name__,
        message=message,
        traceback="\n".join(stacks[ranks[0]]),
        exit_code=EXIT_FAILURE,
        at=waited.at,
        follows=False,
        log=paths.rank_log(ranks[0]),
    )


def _stack(log: Path, attempt: int) -> list[str]:
    """The innermost frames of the last stack in a rank's log, which is that of its main thread."""
    _, found, frames = _log_text(log, attempt).rpartition(STACK)
    lines = frames.splitlines() if found else []
    return list(itertools.takewhile(lambda line: line.startswith("  File "), lines))[:TAIL_LINES]


def _place(frame: str) -> str:
    """Of ``File "a.py", line 3 in f``."""
    return frame.strip().removeprefix("File ").replace('", line ', ":").replace('"', "").replace(" in ", ", ")


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
    text = _log_text(log, attempt) if end.code == -signal.SIGABRT else ""
    follows = "processgroup" in text.lower()
    if hang := WATCHDOG.search(text):
        number, kind, waited_ms = hang.groups()
        message = f"waited for the others in {kind} number {number}, by NCCL, for {int(waited_ms) / 1000:.0f} s in vain"
        follows = True
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


def log_tail(log: Path, attempt: int) -> str:
    """The last lines of this attempt's part of a rank's log."""
    return "\n".join(_log_text(log, attempt).rstrip().splitlines()[-TAIL_LINES:])


def _log_text(log: Path, attempt: int, longest: int = 65536) -> str:
    """The end of this attempt's part of a rank's log."""
    with log.open("rb") as file:
        file.seek(max(0, os.path.getsize(log) - longest))
        text = file.read().decode("utf-8", "replace")
    _, header, rest = text.rpartition(log_header(attempt))
    return rest.partition("\n")[2] if header else text
