"""What reaches the terminal and what the log keeps; the oracle is what a person would see."""

from __future__ import annotations

import io
import os
import random

from mgpu_pipe.launch.preparing import LiveStream, PlainLines


def test_a_bar_that_is_redrawn_leaves_no_trace_in_the_log() -> None:
    plain = PlainLines()
    shown = "\x1b[?25l\r\x1b[2K\x1b[1m bar 10%\x1b[0m\r\x1b[2Ksaved step 5\n bar 20%\r\x1b[2K bar 100%\n\x1b[?25h"
    assert plain.feed(shown) == "saved step 5\n bar 100%\n"


def test_lines_are_kept_whole_however_the_text_is_cut() -> None:
    text = "".join(f"line {number}\n" for number in range(50))
    cuts = sorted(random.Random(0).sample(range(len(text)), 40))
    plain = PlainLines()
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(map(plain.feed, pieces)) == text


def test_the_launcher_gets_all_of_it_and_may_go_away() -> None:
    read_fd, write_fd = os.pipe()
    log = io.StringIO()
    stream = LiveStream(log, write_fd)
    stream.write("\x1b[1mone\x1b[0m\n")
    assert os.read(read_fd, 100) == b"\x1b[1mone\x1b[0m\n"
    os.close(read_fd)
    stream.write("two\n")  # nobody reads any more: the run goes on, the log too
    assert log.getvalue() == "one\ntwo\n"
    os.close(write_fd)
