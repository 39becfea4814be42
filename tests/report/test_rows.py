"""Names beside what is said of them. Oracles: the words put in, in their order, and the columns that they stand in."""

from __future__ import annotations

import sys

import pytest

from mgpu_pipe.report.columns import print_rows

ROWS = [("data", "a text of more words than fit beside it, and " + "x" * 50), ("run", "\x1b[31mred\nsecond line")]


@pytest.mark.parametrize("width", [24, 40, 80])
def test_what_is_said_is_wrapped_in_a_column_of_its_own(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_rows(ROWS, "a run")
    title, *lines, last = capsys.readouterr().out.split("\n")[:-1]
    assert (title[:6], len(title), last) == ("a run ", width, "")
    assert {line[:6] for line in lines} == {"data  ", "run   ", " " * 6}
    assert max(map(len, lines)) <= width
    said = [line[6:] for line in lines]
    at = next(number for number, line in enumerate(lines) if line.startswith("run"))
    assert "".join(said[:at]).replace(" ", "") == ROWS[0][1].replace(" ", "")
    assert said[at:] == ["\ufffd[31mred", "second line"]


def test_only_a_terminal_that_can_gets_bold_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for kind, name in (("xterm", "\x1b[1mdata\x1b[0m"), ("dumb", "data")):
        monkeypatch.setenv("TERM", kind)
        print_rows([("data", "text")])
        assert capsys.readouterr().out == f"{name}  text\n"
