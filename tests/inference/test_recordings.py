"""What is said of a transcript's mistakes. Oracle: the two sentences, compared by eye."""

from __future__ import annotations

import pytest

from mgpu_pipe.inference.audio_samples import mark_mistakes
from mgpu_pipe.report.run_tables import after_table

pytest.importorskip("jiwer")


@pytest.mark.parametrize(
    ("said", "heard", "shown"),
    [
        ("please press one now", "please wun", "please wun\n  missed: one, now; wrong: wun for press"),
        ("press one", "press uh one", "press uh one\n  added: uh"),
        ("press one", "press one uh uh", "press one uh uh\n  added: uh (2 times)"),
        ("press one", "press one", "press one"),
        ("press one", "", "(nothing was heard)"),
        (" ".join("abcdefghijklmnop"), "a", "a\n  missed: b, c, d, e, f, g, h, i, j, k, l, m, and 3 more"),
    ],
)
def test_mistakes_of_a_transcript_are_named_in_words(said: str, heard: str, shown: str) -> None:
    assert mark_mistakes(said, heard) == shown


def test_a_terminal_shows_what_was_said_and_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    said = "please press one now"
    after_table({"samples": [{"prompt": said, "text": f" \u2192 {mark_mistakes(said, 'please one')}"}]})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "please press one now \u2192 please one" in lines and "missed: press, now" in lines
