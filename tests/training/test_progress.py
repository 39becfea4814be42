"""Progress: plain lines where nobody redraws, a bar on a terminal. Oracles: a real pseudo-terminal, plain text."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys

import pytest

from mgpu_pipe.training.progress import Progress

TRAIN = (
    "from mgpu_pipe.training.progress import Progress\n"
    "import sys\n"
    "progress = Progress(40, 'auto', run_name='demo')\n"
    "progress.start(0)\n"
    "for step in range(1, 41):\n"
    "    progress.update(step, 5.0 - step / 10, 12345.0, lr=1e-3)\n"
    "    if step == 20: progress.message('saved [bold]step 20')\n"
    "progress.close()\n"
    "print('rich' in sys.modules)\n"
)


def plain(environment: dict[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("MGPU_TTY", "COLUMNS", "NO_COLOR")}
    return {**kept, "TERM": "xterm-256color", **(environment or {})}


def test_lines_name_first_and_last_step_and_about_every_twentieth_part() -> None:
    stream = io.StringIO()
    progress = Progress(1000, "lines", stream)
    progress.start(0)
    for step in range(1, 1001):
        progress.update(step, 1000 / step, 2500.0, lr=3e-4)
    progress.close()
    steps = [int(found) for found in re.findall(r"^step (\d+)/1000", stream.getvalue(), re.MULTILINE)]
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert len(steps) == len(set(steps))
    assert 20 <= len(steps) <= 22
    assert (
        stream.getvalue()
        .splitlines()[-1]
        .startswith("step 1000/1000 (100%)  loss 1.0000  lr 0.0003  2.5k tok/s  elapsed ")
    )


def test_a_resume_counts_on_and_an_evaluation_shows_at_once() -> None:
    stream = io.StringIO()
    progress = Progress(1000, "lines", stream)
    progress.start(500)
    for step in range(501, 511):
        progress.update(step, 2.0, val_loss=3.25 if step == 505 else None)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["501/1000", "505/1000", "510/1000"]
    assert "val 3.2500" in lines[1]
    assert "val" not in lines[2]
    assert "val" not in lines[0]


def test_off_shows_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(10, "off", stream)
    progress.start()
    progress.update(10, 1.0)
    progress.message("hidden")
    progress.close()
    assert stream.getvalue() == ""
    assert not progress.due(10)


def test_due_says_when_an_update_would_draw() -> None:
    progress = Progress(1000, "lines", io.StringIO())
    progress.start()
    assert progress.due(1)
    progress.update(1, 1.0)
    assert not progress.due(2)
    assert progress.due(51)
    assert progress.due(1000)


def test_a_pipe_gets_lines_and_rich_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True, env=plain())
    assert done.stdout == "False\n"
    assert "\x1b" not in done.stderr
    assert "saved [bold]step 20\n" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("step 40/40 (100%)  loss 1.0000")


def test_a_pipe_that_leads_to_a_terminal_gets_the_bar_in_its_width() -> None:
    environment = plain({"MGPU_TTY": "1", "COLUMNS": "72"})
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True\n"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stderr)
    drawn = [line for line in re.split(r"[\r\n]+", text) if "40/40" in line]
    assert drawn
    assert "loss 1.0000" in drawn[-1]
    assert "12.3k tok/s" in drawn[-1]
    assert "left 0:00" in drawn[-1]
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= 72
    assert "saved [bold]step 20" in text
    assert done.stderr.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize(("terminal", "bar"), [("xterm-256color", True), ("dumb", False)])
def test_a_real_terminal_gets_the_bar_a_dumb_one_lines(terminal: str, bar: bool) -> None:
    main, other = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", TRAIN], stdout=subprocess.DEVNULL, stderr=other, env=plain({"TERM": terminal})
    )
    os.close(other)
    seen = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # the terminal's other side was closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(main)
    assert child.wait() == 0
    assert (b"\x1b[?25l" in seen) is bar
    assert b"40/40" in seen


def test_a_terminal_that_goes_away_does_not_end_the_training() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    progress = Progress(100, "lines", os.fdopen(writer, "w"))
    progress.start()
    for step in range(1, 101):
        progress.update(step, 1.0)
    progress.message("nobody hears")
    progress.close()
    progress.close()
    with contextlib.suppress(BrokenPipeError):
        progress.stream.close()


def test_a_name_with_markup_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    stream = io.StringIO()
    progress = Progress(5, "bar", stream, run_name="[red]lr=1")
    progress.start()
    progress.update(5, 1.0)
    progress.close()
    assert "[red]lr=1" in stream.getvalue()
