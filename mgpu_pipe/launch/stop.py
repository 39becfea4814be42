"""Stop signals: before a run began they end the program, and in a worker they set a flag.

Nothing is saved inside a handler: that would stall collectives. The worker's handler sets a flag; training asks for it
at the boundaries of steps and micro-batches, where the ranks agree on it. Imports next to nothing: the program takes
the signals over before it imports itself.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from mgpu_pipe.errors import EXIT_STOPPED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""SIGUSR1 is what SLURM jobs commonly ask for as their warning (``--signal=USR1@120``); SIGHUP comes when a terminal
is closed or a connection dropped."""
SAME_SIGNAL_S = 0.3
"""timeout(1) and torchrun deliver one request twice, to the process and to its group, within this time."""
WHERE = signal.SIGUSR2
"""Has a worker write the stacks of its threads to standard error, whatever it is doing."""
NOT_BEGUN = "stopped before the run began; there was nothing to save"
STOPPING = "stopping after this step and saving; Ctrl-C again leaves at once"
ANSWERS_ALONE = ("-h", "--help", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion")
"""Options with which the command answers a question and starts no run."""

MEANT = {signal.SIGUSR1: "the time limit is near", signal.SIGTERM: "preempted, requeued or cancelled"}
"""What the signals of a scheduler mean, usually."""

_requested = False
_asked_by = ""
_run_ended = False
_second_leaves = False
_told: str = ""
_before_leaving: Callable[[str], None] | None = None


def taken_over(handler: Callable[[int, FrameType | None], None]) -> dict[int, object]:
    """Let ``handler`` take the stop signals of this process; returns what handled them before.

    A SIGHUP that was ignored from the start stays ignored: that is what nohup(1) asks for.
    """
    numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def asks_for_a_run(words: Sequence[str]) -> bool:
    """Whether the command line's ``words`` train: ``train``, or overrides without a verb."""
    if not words or not (words[0] == "train" or "=" in words[0] or words[0].startswith(("-", "~", "+"))):
        return False
    return not any(word.split("=")[0] in ANSWERS_ALONE for word in words)


def leave_until_a_run_begins() -> None:
    """From now on a stop signal ends this program with exit code 75: a run was asked for, and has written nothing."""
    taken_over(_leave)


def tell_before_leaving(told: Callable[[str], None]) -> None:
    """Have ``told`` called, with the signal in words, before this program leaves without having begun a run."""
    global _before_leaving
    _before_leaving = told


def run_begins() -> None:
    """The (next) run has written nothing yet."""
    global _run_ended
    _run_ended = False
    if _requested:
        _leave(signal.SIGTERM, None)


def run_ended(*, asked_to_stop: bool) -> None:
    """The run is over: a stop signal that arrives now counts for the next run of a sweep.

    Args:
        asked_to_stop: one arrived during the run. It may have been too late for that run, and counts for the next.
    """
    global _run_ended, _requested
    _run_ended = True
    _requested = _requested or asked_to_stop


def _leave(number: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True
    if not _run_ended:
        tell(NOT_BEGUN)
        if _before_leaving is not None:
            note(number)
            _before_leaving(_asked_by)
        os._exit(EXIT_STOPPED)


def tell(line: str) -> None:
    """Write ``line`` to standard error; also inside a handler, and where the terminal is gone."""
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        return


def install(*, second_leaves: bool, told: str = "") -> None:
    """Take over the stop signals of this process, a worker.

    Args:
        second_leaves: whether a second SIGINT or SIGTERM ends the process at once; under a launcher that watches,
            the launcher decides that.
        told: what the first signal is answered with on standard error.
    """
    global _second_leaves, _told
    _second_leaves, _told = second_leaves, told
    taken_over(_on_signal)
    faulthandler.register(WHERE, file=2, chain=False)


def note(number: int) -> None:
    """Remember the first stop signal that this process got; for signal handlers."""
    global _asked_by
    meant = MEANT.get(signal.Signals(number), "")
    _asked_by = _asked_by or f"{signal.Signals(number).name}{f' ({meant})' if meant else ''}"


def asked_by() -> str:
    """The first stop signal that this process got, in words; empty where it got none."""
    return _asked_by


def stop_requested() -> bool:
    """Whether this process was asked to stop. Ranks may differ: they have to agree before they act on it."""
    return _requested


class Insistence:
    """Tells a second SIGINT or SIGTERM, which leaves at once, from one request that was delivered twice."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_second(self, number: int) -> bool:
        if number in (signal.SIGUSR1, signal.SIGHUP):  # a warning: the SIGTERM that follows it is the first request
            return False
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at > SAME_SIGNAL_S


_insistence = Insistence()


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _requested
    note(number)
    if _told and not _requested:
        tell(_told)
    _requested = True
    if _insistence.is_second(number) and _second_leaves:
        os._exit(1)
