"""Stop signals of launcher and workers, and the launcher's inbox for them."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from mgpu_pipe.errors import EXIT_STOPPED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""SIGUSR1 is the usual warning of SLURM jobs (``--signal=USR1@120``); SIGHUP follows a closed terminal."""
SAME_SIGNAL_S = 0.3
"""Seconds within which timeout(1) and torchrun deliver a request twice, to the process and to its group."""
WHERE = signal.SIGUSR2
"""Signal that makes a worker write the stacks of its threads to standard error."""
NOT_BEGUN = "stopped before the run began; there was nothing to save"
STOPPING = "stopping after this step and saving; Ctrl-C again leaves at once"
ANSWERS_ALONE = ("-h", "--help", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion")
"""Options that make the command answer and start no run."""

MEANINGS = {signal.SIGUSR1: "the time limit is near", signal.SIGTERM: "preempted, requeued or cancelled"}
"""Usual meanings of a scheduler's signals."""

_requested = False
_asked_by = ""
_run_ended = False
_second_leaves = False
_stop_message: str = ""
_before_leaving: Callable[[str], None] | None = None


def taken_over(handler: Callable[[int, FrameType | None], None]) -> dict[int, object]:
    """Let ``handler`` handle the stop signals; returns the previous ones. An ignored SIGHUP stays so (nohup(1))."""
    numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def asks_for_a_run(words: Sequence[str]) -> bool:
    """Whether the command line's ``words`` train: ``train``, or overrides without a verb."""
    if not words or not (words[0] == "train" or "=" in words[0] or words[0].startswith(("-", "~", "+"))):
        return False
    return not any(word.split("=")[0] in ANSWERS_ALONE for word in words)


def leave_until_a_run_begins() -> None:
    """Let a stop signal end this program with exit code 75 until a run has written something."""
    taken_over(_leave)


def tell_before_leaving(callback: Callable[[str], None]) -> None:
    """Call ``callback`` with the signal in words before this program exits without having started a run."""
    global _before_leaving
    _before_leaving = callback


def run_begins() -> None:
    """Mark the start of the (next) run, which has written nothing yet."""
    global _run_ended
    _run_ended = False
    if _requested:
        _leave(signal.SIGTERM, None)


def run_ended(*, asked_to_stop: bool) -> None:
    """Mark the end of the run, so that a later stop signal, and one that arrived, counts for the next of a sweep."""
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
    """Write ``line`` to standard error; works in a signal handler and without a terminal."""
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        return


def install(*, second_leaves: bool, message: str = "") -> None:
    """Take over the stop signals of this process, a worker.

    Args:
        second_leaves: whether a second SIGINT or SIGTERM ends the process at once; a supervising launcher decides
            that itself.
        message: answer to the first signal on standard error.
    """
    global _second_leaves, _stop_message
    _second_leaves, _stop_message = second_leaves, message
    taken_over(_on_signal)
    faulthandler.register(WHERE, file=2, chain=False)


def note(number: int) -> None:
    """Remember the first stop signal of this process; for signal handlers."""
    global _asked_by
    meant = MEANINGS.get(signal.Signals(number), "")
    _asked_by = _asked_by or f"{signal.Signals(number).name}{f' ({meant})' if meant else ''}"


def asked_by() -> str:
    """The first stop signal of this process in words; empty if none arrived."""
    return _asked_by


def stop_requested() -> bool:
    """Whether this process got a stop signal. Ranks may differ and must agree before acting."""
    return _requested


class Insistence:
    """Detects a second SIGINT or SIGTERM, which ends at once, as opposed to a request delivered twice."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_second(self, number: int) -> bool:
        if number in (signal.SIGUSR1, signal.SIGHUP):  # a warning; the SIGTERM after it is the first request
            return False
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at > SAME_SIGNAL_S


_insistence = Insistence()


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _requested
    note(number)
    if _stop_message and not _requested:
        tell(_stop_message)
    _requested = True
    if _insistence.is_second(number) and _second_leaves:
        os._exit(1)


class StoppedBeforeTraining(KeyboardInterrupt):
    """A stop signal arrived before anything needed saving."""


class SignalInbox:
    """Handles the stop signals and SIGCHLD of the main thread while open.

    At first a stop signal raises :class:`StoppedBeforeTraining`; after :meth:`collect` it is kept for the supervisor.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self.kill_requested = False
        self._raise = True
        self._insistence = Insistence()
        self._before: dict[int, object] = {}
        self._read_fd = self._write_fd = -1
        self._old_wakeup_fd = -1

    def __enter__(self) -> SignalInbox:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, self._on_signal), **taken_over(self._on_signal)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def collect(self) -> None:
        """Keep later stop signals instead of raising."""
        self._raise = False

    def wait(self, timeout: float) -> None:
        """Sleep until a signal arrives or ``timeout`` seconds passed."""
        ready, _, _ = select.select([self._read_fd], [], [], max(0.0, timeout))
        if ready:
            try:
                while os.read(self._read_fd, 4096):
                    continue
            except BlockingIOError:
                return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        note(number)
        self.stop_requested = True
        self.kill_requested = self._insistence.is_second(number) or self.kill_requested
        if self._raise:
            raise StoppedBeforeTraining
