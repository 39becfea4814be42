"""Names and contents of files bring no escape sequence to the terminal, and no error a second line."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.errors import print_line, print_text, printable
from mgpu_pipe.launch.failure import Failure
from mgpu_pipe.sweep.point import FINISHED
from tests.sweep.support import recorded_sweep

PACKAGE = Path(__file__).parents[2] / "mgpu_pipe"
PRINTERS = {
    "errors.py": "defines the two functions that print",
    "report/columns.py": "sets what it has made printable in bold",
    "cli/verbs/data.py": "sets what it has made printable in colour",
}
"""Files with a bare ``print``."""
CONSOLES = {
    "report/run_tables.py": "its cells are printable",
    "verify/certificate.py": "its cells are printable",
    "launch/preparing.py": "a progress bar with constant titles",
    "training/progress.py": "a progress bar; its lines are printable",
}
"""Files that draw with rich."""
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\nerror: forged"


def assert_harmless(text: str) -> None:
    assert text and not set("\x1b\x07\x9b\u202e\r") & set(text)
    assert not any(line.startswith("error: forged") for line in text.splitlines())


@pytest.mark.parametrize("words", [["show"], ["best"], ["list"], ["show", "--json"], ["list", "--json"]], ids=" ".join)
def test_the_sweep_of_a_stranger_sends_nothing_to_the_terminal(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = recorded_sweep(tmp_path, 3, 4)
    for point in store.points():
        store.change(point, overrides=[f"run.tags=[{ESCAPE}]"], reason=ESCAPE, status=FINISHED)
    store.amend(words=["-m", f"run.name={ESCAPE}"], fixed=[f"run.name={ESCAPE}"])
    verb, *options = words
    name = [] if verb == "list" else [store.name]
    assert cli.main(["sweeps", verb, *name, *options, f"run.root={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert_harmless(shown.out + shown.err)
    if "--json" in options:
        json.loads(shown.out)


def test_the_run_of_a_stranger_sends_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_sweep(tmp_path, 1, 4)
    (folder,) = (tmp_path / "runs").iterdir()
    renamed = folder.rename(folder.parent / ESCAPE.replace("/", ""))
    summary = {"name": ESCAPE, "status": ESCAPE, "objective": ESCAPE, "samples": [{"prompt": ESCAPE, "text": ESCAPE}]}
    (renamed / "summary.json").write_text(json.dumps(summary))
    (renamed / "config.yaml").write_text(json.dumps({"run": {"name": ESCAPE, "tags": [ESCAPE]}}))
    for words in (["runs"], ["runs", "--json"], ["report", str(renamed)], ["checkpoints", str(renamed)]):
        cli.main([*words, f"run.root={tmp_path / 'runs'}"])
        shown = capsys.readouterr()
        assert_harmless(shown.out + shown.err)


@pytest.mark.parametrize(
    "words",
    [
        ["check", f"model.{ESCAPE}=1"],
        ["check", "model=hf", f"model.path={ESCAPE}"],
        ["check", f"experiment={ESCAPE}"],
        ["eval", ESCAPE],
        ["runs", f"--{ESCAPE}"],
        ["sweeps", "show", ESCAPE],
        ["sweeps", ESCAPE],
        [ESCAPE],
    ],
    ids=lambda words: " ".join(word for word in words if word.isprintable()),
)
def test_an_error_about_a_name_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert_harmless(shown.err)
    assert shown.err.count("\n") == 1 and shown.err.startswith("error: ")


def test_what_a_worker_says_of_a_name_is_one_line() -> None:
    failure = Failure(0, "DataError", f"data.paths={ESCAPE}: no such file", "", 2, 0.0, False, Path("rank-0.log"))
    assert failure.show().count("\n") == 0


def test_control_and_format_characters_are_visible_and_letters_stay(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(f"a\tb {ESCAPE}")
    print_text("one\r\n\ttwo \ud800\u2028\u200d\u00a0é")
    assert capsys.readouterr().out.splitlines() == [
        "a\tb \ufffd]0;owned\ufffd\ufffd[2J\ufffd31m\ufffd\ufffderror: forged",
        "one\ufffd",
        "\ttwo \ufffd\ufffd\u200d\u00a0é",
    ]
    assert printable("a\nb", keep="") == "a\ufffdb"


@pytest.mark.slow
def test_every_module_prints_by_the_functions_that_make_text_printable() -> None:
    for file in PACKAGE.rglob("*.py"):
        name = str(file.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            if (
                call == "print"
                or call in ("sys.stdout.write", "sys.stderr.write")
                or call.startswith("traceback.print")
            ):
                assert name in PRINTERS, f"{name}:{node.lineno}: use print_line or print_text of mgpu_pipe.errors"
            if call.rpartition(".")[2] in ("Console", "make_console"):
                assert name in CONSOLES, f"{name}:{node.lineno}: print by a function of mgpu_pipe.report.run_tables"
