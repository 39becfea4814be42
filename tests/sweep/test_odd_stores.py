"""Stores that parse and are no sweep's: one line from every verb, and the other sweeps are listed all the same."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.sweep import parallel
from mgpu_pipe.sweep.point import FINISHED, SPEC_ENTRIES, Point, as_record
from mgpu_pipe.sweep.store import create
from tests.sweep.support import asked

WRONG = (None, "x", 1.5, [[1]], {"a": "b"}, 10**400, "a\0b")
POINT = as_record(Point(1, ("seed=1",), 1, FINISHED, metrics={"val/loss": 1.0}, step=2))
WHOLE_FILES = ("[]", "3", "null", "", "[" * 5000, "NaN", '{"version": 1}')


def odd_points() -> list[str]:
    changed = [json.dumps({**POINT, key: value}) for key in POINT for value in WRONG]
    missing = [json.dumps({key: POINT[key] for key in POINT if key != left_out}) for left_out in POINT]
    return [*changed, *missing, *WHOLE_FILES]


def odd_askeds() -> list[str]:
    usual = {"version": 1, "kind": "sqlite", "created": 1.7e9, **asked()}
    changed = [json.dumps({**usual, key: value}) for key in SPEC_ENTRIES for value in WRONG]
    missing = [json.dumps({key: usual[key] for key in usual if key != left_out}) for left_out in usual]
    return [*changed, *missing, *WHOLE_FILES]


def runs_without_a_stack(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.main(["sweeps", *words])
    told = capsys.readouterr()
    assert code in (0, 2), told
    if code == 2:
        assert told.err.startswith("error: ") and told.err.count("\n") == 1, told
    return told.out


@pytest.mark.parametrize("kind", ["point", "asked"])
def test_no_store_is_a_stack_and_the_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path("outputs")
    folder = create(root, "odd", asked(), [[["seed=1"]]]).folder
    create(root, "good", asked(), [[["seed=1"]]])
    for number, text in enumerate(odd_points() if kind == "point" else odd_askeds()):
        if kind == "asked":
            (folder / "sweep.json").write_text(text)
        else:
            with sqlite3.connect(folder / "points.sqlite") as database:
                database.execute("UPDATE points SET record = ?", (text,))
        for words in (("show", "odd"), ("best", "odd")):
            runs_without_a_stack(capsys, *words)
        assert "good" in runs_without_a_stack(capsys, "list")
        if number % 20 == 0:
            runs_without_a_stack(capsys, "report", "odd")


def test_a_workers_variable_that_is_none_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parallel.WORKER, "abc")
    with pytest.raises(Exception, match=f"{parallel.WORKER}=abc: is set by a sweep for its workers alone; unset it"):
        parallel.chosen_points()
