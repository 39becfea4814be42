"""Tables on stdout, as a pipe of 80 columns and as a terminal get them. Oracles: the numbers put in, line lengths."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.report.columns import print_rows
from mgpu_pipe.report.numbers import MISSING
from mgpu_pipe.report.overview import overview, summary
from mgpu_pipe.report.page_sections import batch_text, blocks, figures
from mgpu_pipe.report.run_tables import after_table, runs_table
from mgpu_pipe.report.run_view import load_run
from tests.report.fake_runs import MakeRun


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


class Prepared:
    train_samples, validation_samples = 42_112, 256

    def amounts(self) -> list[tuple[int, str]]:
        return [(1702, "documents"), (11_480_233, "tokens")]


def configured() -> RunConfig:
    config = RunConfig()
    config.run.name, config.model.name, config.model.type = "[red]quick", "llama_small", "llama"
    config.trainer.max_steps = 600
    return config


def test_the_table_before_a_run_holds_model_topology_batch_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    config = configured()
    config.model.name, config.model.config = "llama_small", {"vocab_size": 4096, "hidden_size": 256}
    config.strategy.name, config.strategy.dp_replicate, config.data.micro_batch_size = "ddp", "auto", 8
    print_rows(summary(config, 2, Prepared(), "2 CPU cores"), config.run.name)  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for told in (
        *("[red]quick", "llama_small (llama), ", "ddp, 2 CPU processes: dp_replicate=2 on 2 CPU cores"),
        *("32 samples = 2 x 2 micro-batches x 8; 8,192 tokens a step", "11.5M tokens"),
        *("42,112 samples to train on, 256 held out", "600 (4,915,200 tokens, 0.456 epochs)", "AdamW, lr 0.0003"),
        "gradient norm clipped to 1",
    ):
        assert told in words, told


def test_check_has_a_table_without_data() -> None:
    config = configured()
    config.trainer.max_steps, config.trainer.max_epochs = None, 3
    rows = dict(overview(config))
    assert rows["steps"] == "3 epochs" and "held out" in rows["data"]
    assert set(rows) - set(dict(summary(config))) == {"memory", "run"}


def test_the_result_ends_with_perplexity_beside_the_unigram_baseline(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(steps=60, summary={"metrics": {"train/loss": 3.25, "val/loss": math.log(40.0)}})
    after_table(json.loads(run.summary.read_text()), {"report": "/a/" + "long/" * 30 + "report.html"})
    text = capsys.readouterr().out
    assert re.search(r"model\s+unigram baseline\s+ratio\s*\n.*\n.*40\.00\s+742\.8\s+18\.6 x lower", text)
    assert "3.2500" in text
    assert "def read_lines(path):" in text
    assert "/a/" + "long/" * 30 + "report.html" in text, "a path is not broken, so that it can be copied"


def test_bits_a_byte_stand_beside_the_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    after_table({"metrics": {"val/perplexity": 900.0, "val/bits_per_byte": 1.5}})
    assert re.search(r"bits a byte\s*\n.*\n.*900\.0\s+1\.5", capsys.readouterr().out)


def test_a_model_worse_than_the_baseline_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    after_table({"metrics": {"val/perplexity": 900.0}, "data": {"unigram_perplexity": 450.0}})
    assert "2 x higher" in capsys.readouterr().out


@pytest.mark.parametrize("summary", [{}, {"metrics": None, "samples": None, "data": []}, {"samples": [1, {}]}])
def test_a_summary_that_lacks_everything_has_a_table(summary: dict, capsys: pytest.CaptureFixture[str]) -> None:
    after_table(summary)
    assert "unfinished" in capsys.readouterr().out


def test_text_of_a_model_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    after_table({"samples": [{"prompt": "[bold]a", "text": "\x1b]0;owned\x07\x1b[2J[/red] end"}]})
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]a" in text
    assert "[/red] end" in text


def test_runs_are_compared_within_eighty_columns(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(folder=f"2026-01-01_00-00-0{at}-aaaaaaaa", steps=60, lr=lr, overrides=(f"strategy={strategy}",))
        for at, (lr, strategy) in enumerate([(1e-3, "ddp"), (3e-4, "ddp"), (1e-3, "single"), (3e-4, "single")])
    ]
    runs_table(runs)
    text = capsys.readouterr().out
    table, folders = text.split("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("finished") == 4
    assert "time" in table.splitlines()[0]
    for told in ("optimizer.lr=0.001", "optimizer.lr=0.0003", "strategy=single"):
        assert told in table
    assert "trainer.devices" not in table
    assert folders.split() == [word for at, run in enumerate(runs, 1) for word in (str(at), str(run.root))]
    far = "data.paths=['/somewhere/far/away/corpus/*.jsonl']"
    runs_table([runs[0], make_run(folder="2026-01-01_00-00-09-aaaaaaaa", steps=60, lr=1e-3, overrides=(far,))])
    table, folders = capsys.readouterr().out.split("\n\n")
    assert len(table.splitlines()) == 4 and far in folders and far[:9] not in table


def test_a_run_on_pictures_says_nothing_of_tokens(make_run: MakeRun) -> None:
    metrics = {"throughput/tokens_per_s": 0.0, "throughput/padding": 0.0, "throughput/samples_per_s": 61.9}
    batch = {"global_batch_size": 32, "data_parallel_size": 1, "micro_batch_size": 8, "seq_len": 256}
    view = load_run(make_run(steps=6, summary={"metrics": metrics, "batch": batch}))
    assert view.counts_tokens and "8,192 tokens a step" in batch_text(view)
    of_pictures = {**view.metrics, "throughput/tokens_per_s": [0.0] * 6}
    view = replace(view, metrics=of_pictures)
    assert batch_text(view) == "32 samples = 1 process \u00d7 4 micro-batches \u00d7 8" and math.isnan(
        view.tokens_per_s
    )
    text = json.dumps(blocks(view))
    assert "samples_per_s" in text
    assert not [word for word in ("tokens_per_s", "padding", "tokens a sample", "tokenizer") if word in text]
    assert next(card for card in figures(view) if card["label"] == "Throughput")["value"] == "61.9"


def test_runs_with_equal_overrides_are_told_apart_by_their_configuration(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        make_run(folder=f"2026-01-01_00-00-0{at}-aaaaaaaa", steps=60, config={"seed": at, "run": {"name": f"r{at}"}})
        for at in range(2)
    ]
    runs_table(runs)
    table = capsys.readouterr().out.split("\n\n")[0]
    assert "seed=0" in table
    assert "seed=1" in table
    assert "run.name" not in table
    assert "r0" in table


def test_a_run_without_metrics_stands_in_the_table(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    empty = make_run(folder="2026-01-01_00-00-09-bbbbbbbb", steps=60)
    empty.metrics.unlink()
    empty.summary.unlink()
    runs_table([make_run(steps=60), empty])
    assert re.search(rf"2 .*unfinished\s+0\s+{MISSING}", capsys.readouterr().out)


def test_folders_below_the_working_directory_are_shown_relative(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(steps=60)
    monkeypatch.chdir(tmp_path)
    runs_table([run])
    assert capsys.readouterr().out.splitlines()[-1] == f"1  outputs/quickstart/{run.root.name}"
