"""The launcher's inbox of signals: what arrived, in order, and a wait that a signal or a dead child ends."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType

from mgpu_pipe.launch.stop import Insistence, note, taken_over


class StoppedBeforeTraining(KeyboardInterrupt):
    """A stop signal arrived while nothing was to be saved yet."""


class SignalInbox:
    """Takes the stop signals and SIGCHLD of the main thread while it is open.

    At first a stop signal raises :class:`StoppedBeforeTraining` wherever the launcher is; after :meth:`collect`
    it is kept for the supervisor.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def collect(self) -> None:
        """From now on keep stop signals instead of raising."""
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
