"""Tables at several widths. Oracles: the numbers put in, each in one piece, and the width of the terminal."""

from __future__ import annotations

import json
import re

import pytest

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.report.columns import print_columns, print_rows
from mgpu_pipe.report.overview import overview
from mgpu_pipe.report.run_tables import after_table, differences_table, runs_table
from tests.report.fake_runs import MakeRun

NAMES = ("state", "step", "loss", "tok/s", "strategy", "age", "size", "tags", "run")
NUMERIC = ("step", "loss", "tok/s", "age", "size")
ROW = ("finished", "123,600", "3.31234", "18.8k", "megatron", "3 d 4 h", "12.40 GiB", "paper,v2", "outputs/" + "a" * 90)


@pytest.fixture(params=[60, 80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return int(request.param)


def test_a_sweeps_table_breaks_no_number(width: int, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    rates = (0.0284762, 0.00284762, 0.000284762123456)
    runs = [
        make_run(folder=f"2026-01-01_00-00-0{at}-aaaaaaaa", steps=60, lr=rate, overrides=(f"strategy=hsdp_{at}",))
        for at, rate in enumerate(rates)
    ]
    for run in runs:
        run.summary.write_text(json.dumps({**json.loads(run.summary.read_text()), "wall_s": 7384.0}))
    runs_table(runs)
    text = capsys.readouterr().out
    table = text.split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= width
    words = text.split()
    assert {f"optimizer.lr={rate}" for rate in rates} <= set(words)
    assert words.count("finished") == 3 and (words.count("2:03:04") == 3 or "not shown" in text)
    for time in re.findall(r"\S*:\S*", table):
        assert time in ("2:03:04", "columns:"), time


def test_a_narrow_table_shows_its_figures_whole_and_names_what_it_leaves_out(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    print_columns(NAMES, [ROW, ROW], NUMERIC, spare=("tags", "size", "age", "tok/s"))
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "outputs/" not in line]
    assert max(map(len, lines)) <= width and text.count(ROW[-1]) == 2, "what is copied stays whole"
    shown = lines[0].split()
    left_out = text.rpartition("not shown at")[2].partition(":")[2].replace(",", " ").split()
    assert {*shown, *left_out} | {"run"} == set(NAMES)
    for name, cell in zip(NAMES[:-1], ROW[:-1], strict=True):
        assert (name in shown) == (cell in text)


def test_a_pipe_gets_every_column(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_columns(NAMES, [ROW], NUMERIC)
    row = capsys.readouterr().out.splitlines()[1]
    assert all(cell in row for cell in ROW)


def test_names_lose_their_first_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_columns(
        ("tensor", "error"), [("model.layers.10.self_attn.q_proj.weight", "1.2e-05")], ("error",), below=(), width=30
    )
    assert capsys.readouterr().out.splitlines()[1] == "\u2026f_attn.q_proj.weight  1.2e-05"


def test_other_tables_fit(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig()
    config.model.name, config.model.type, config.trainer.max_steps = "llama_small", "llama", 1_234_567
    config.data.global_batch_size, config.optimizer.lr = 4096, 0.000284762
    print_rows(overview(config), "check")
    after_table({"metrics": {"val/perplexity": 284.762}, "data": {"unigram_perplexity": 742.8}, "wall_s": 7384.0})
    differences_table([("optimizer.lr", "0.000284762", "0.00284762"), ("data.paths", "[a]", "[" + "b" * 50 + "]")])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    for number in ("0.000284762", "0.00284762", "284.8", "742.8", "1,234,567"):
        assert number in text, number
