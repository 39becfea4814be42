"""Progress of a run on stderr: a bar on a terminal, plain lines elsewhere.

An update costs about a microsecond, unless it is time to draw: the bar is drawn at most ten times a second, by the
thread that trains, and rich is imported only for a bar.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO

from mgpu_pipe.errors import print_text, printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

BAR_INTERVAL_S = 0.1
LINE_INTERVAL_S = 10.0
"""Longest silence between lines; after 100 s a tenth of the time passed, so that a long run's log stays short."""
LONGEST_LINE_INTERVAL_S = 600.0
LINES_A_RUN = 20

Mode = Literal["auto", "bar", "lines", "off"]


class Progress:
    """Progress of one run, shown by rank 0.

    Args:
        total_steps: optimizer steps of the whole run.
        mode: ``bar``, ``lines``, ``off``, or ``auto``: a bar where ``stream`` is a terminal, lines elsewhere.
            ``MGPU_TTY=1`` in the environment says that what is written to ``stream`` reaches a terminal, whose
            width is then ``COLUMNS``.
        stream: where to write; stderr by default.
        run_name: shown before the bar.
        unit: what is counted, in the singular.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Mode = "auto",
        stream: TextIO | None = None,
        run_name: str = "training",
        unit: str = "step",
    ) -> None:
        self.total_steps, self.run_name, self.unit = total_steps, run_name, unit
        self.stream = sys.stderr if stream is None else stream
        self.mode: Mode = _choose(self.stream) if mode == "auto" else mode
        self._bar: RichProgress | None = None
        self._line_every = max(1, total_steps // LINES_A_RUN)
        self._first = self._step = self._drawn_step = 0
        self._loss: float | None = None
        self._rate: tuple[float, str] | None = None
        self._lr: float | None = None
        self._val_loss: float | None = None
        self._started = self._next = time.monotonic()
        self._pace_from: tuple[int, float] | None = None
        self._closed = self.mode == "off"

    def start(self, initial_step: int = 0) -> None:
        """Begin; ``initial_step`` steps were done before (a resume)."""
        self._first = self._step = self._drawn_step = initial_step
        self._started = self._next = time.monotonic()
        if self.mode == "bar" and self._bar is None:
            self._guard(self._start_bar)

    def due(self, step: int) -> bool:
        """Whether an update for ``step`` would draw now; the caller then skips values that only a drawing needs."""
        if self._closed:
            return False
        if time.monotonic() >= self._next or step >= self.total_steps:
            return True
        return self.mode == "lines" and (self._drawn_step == self._first or step - self._drawn_step >= self._line_every)

    def update(
        self,
        step: int,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        samples_per_s: float | None = None,
        lr: float | None = None,
        val_loss: float | None = None,
    ) -> None:
        """Record that ``step`` steps are done. A value that is not given stays as it was."""
        self._step = step
        if loss is not None:
            self._loss = loss
        if tokens_per_s is not None:
            self._rate = (tokens_per_s, "tok/s")
        if samples_per_s is not None and not tokens_per_s:  # nobody counts tokens of pictures
            self._rate = (samples_per_s, "samples/s")
        if lr is not None:
            self._lr = lr
        if val_loss is not None:
            self._val_loss = val_loss
        if self._pace_from is None:  # the first step compiles and warms up: time left is judged without it
            self._pace_from = (step, time.monotonic())
        if self.due(step) or (val_loss is not None and not self._closed):
            self._guard(self._draw)

    def message(self, text: str) -> None:
        """Show ``text`` as a separate line above the bar."""
        if not self._closed:
            self._guard(lambda: self._say(text))

    def close(self) -> None:
        """Draw the last state and give the terminal back; may be called twice."""
        if self._closed:
            return
        if self._step > self._drawn_step or self.mode == "bar":
            self._guard(self._draw)
        if self._bar is not None:
            self._guard(self._bar.stop)
        self._closed = True

    def _guard(self, show: Callable[[], None]) -> None:
        """Run ``show``; a terminal that went away (a closed ssh session) must not end the training."""
        try:
            show()
        except OSError:
            self._closed = True

    def _draw(self) -> None:
        self._drawn_step = self._step
        if self._bar is None:
            self._write_line(self._line())
            self._val_loss = None  # a line shows it once; a bar keeps showing the last one
            now = time.monotonic()
            self._next = now + min(max(LINE_INTERVAL_S, (now - self._started) / 10), LONGEST_LINE_INTERVAL_S)
            return
        self._bar.update(self._bar.task_ids[0], completed=self._step, facts=self._facts(" "), left=self._left())
        self._bar.refresh()
        self._next = time.monotonic() + BAR_INTERVAL_S

    def _say(self, text: str) -> None:
        if self._bar is None:
            self._write_line(text)
        else:
            self._bar.console.print(printable(text), markup=False, highlight=False)

    def _write_line(self, text: str) -> None:
        print_text(text, file=self.stream)
        self.stream.flush()

    def _line(self) -> str:
        share = 100 * self._step // max(1, self.total_steps)
        elapsed = _clock(time.monotonic() - self._started)
        head = f"{self.unit} {self._step}/{self.total_steps} ({share}%)"
        parts = (head, self._facts("  "), f"elapsed {elapsed}", f"left {self._left()}")
        return "  ".join(part for part in parts if part)

    def _facts(self, gap: str) -> str:
        facts = []
        if self._loss is not None:
            facts.append(f"loss {self._loss:.4f}")
        if self._val_loss is not None:
            facts.append(f"val {self._val_loss:.4f}")
        if self._lr is not None and self._bar is None:
            facts.append(f"lr {self._lr:.3g}")
        if self._rate is not None:
            facts.append(f"{_short(self._rate[0])} {self._rate[1]}")
        return gap.join(facts)

    def _left(self) -> str:
        if self._step >= self.total_steps:
            return "0:00"
        if self._pace_from is None or self._step <= self._pace_from[0]:
            return "-:--"
        steps, seconds = self._step - self._pace_from[0], time.monotonic() - self._pace_from[1]
        return _clock(seconds / steps * (self.total_steps - self._step))

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        # a bar that was asked for is drawn, also into a pipe that leads to a terminal
        console = Console(file=self.stream, force_terminal=True)
        name = [TextColumn("[bold]{task.description}", markup=True)] if console.width >= 100 else []
        self._bar = RichProgress(
            *name,
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}", markup=False),
            console=console,
            auto_refresh=False,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=self.stream is sys.stderr,
        )
        self._bar.add_task(escape(self.run_name), total=self.total_steps, completed=self._first, facts="", left="-:--")
        self._bar.start()


def _choose(stream: TextIO) -> Mode:
    if os.environ.get("TERM") == "dumb":
        return "lines"
    return "bar" if os.environ.get("MGPU_TTY") == "1" or stream.isatty() else "lines"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
