"""Why a run is not finished, its warnings, its logs' ends, its times and settings. Oracles: the files put there."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import struct
from pathlib import Path

import pytest
import yaml

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.report import logs as logs_module
from mgpu_pipe.report.account import changed_defaults, explain_end, times
from mgpu_pipe.report.compare_runs import samples
from mgpu_pipe.report.html import write_report
from mgpu_pipe.report.logs import MOST_WARNINGS, SHOWN_LINES, Logs, read_logs
from mgpu_pipe.report.page_sections import blocks, figures, subtitle
from mgpu_pipe.report.run_tables import after_table, runs_table
from mgpu_pipe.report.run_view import load_run
from mgpu_pipe.runs import history
from mgpu_pipe.runs.record import append_samples
from tests.report.fake_runs import MakeRun
from tests.report.test_html import page_of


def told(run: RunPaths) -> str:
    found = explain_end(load_run(run))
    return "" if found is None else f"{found['text']} {found['command']}".strip()


def logs_of(run: RunPaths, failed_rank: int | None = None) -> Logs:
    problems: list[str] = []
    logs = read_logs(run, failed_rank, problems)
    assert problems == []
    return logs


def test_only_a_run_that_did_not_finish_says_why(make_run: MakeRun) -> None:
    run = make_run(steps=60, overrides=("data.paths=[a b.txt]",))
    assert told(run) == ""
    summary = json.loads(run.summary.read_text())
    run.summary.write_text(json.dumps({**summary, "status": "stopped", "step": 30, "max_steps": 60}))
    text = told(run)
    assert text.startswith(
        "A signal or a callback stopped it after step 30 of 60. Its newest checkpoint is of step 60;"
    )
    assert text.endswith(f"'data.paths=[a b.txt]' run.dir={run.root} checkpoint.resume=auto")
    run.summary.write_text(json.dumps({**summary, "status": "failed"}))
    assert told(run).startswith("It failed after step 60 of 60.")
    run.summary.unlink()
    assert "left no word why: it was killed, or its machine went down. Its newest checkpoint" in told(run)
    for manifest in run.checkpoints.glob("*/manifest.json"):
        manifest.unlink()
    assert told(run).endswith("No checkpoint was saved.")
    run.metrics.unlink()
    assert "It ended after no logged step" in told(run)


def test_a_folder_that_a_launch_holds_is_of_a_running_run(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    run.summary.unlink()
    with open(run.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert load_run(run).status == "running"
        assert told(run).startswith("A launch holds this run's folder; the last logged is step 60 of 60, written 20")
    assert load_run(run).status == "unfinished"
    run.lock.unlink()
    os.mkfifo(run.lock)
    assert load_run(run).status == "unfinished", "a pipe is not waited for"


def test_warnings_are_told_once_with_the_ranks_that_gave_them(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    for rank in range(2):
        lines = ["a.py:3: UserWarning: slow", "  warn()", "step 1/60 no warning", "a.py:3: UserWarning: slow"]
        run.rank_log(rank).write_text("\n".join([*lines, *(["WARNING: only here"] if rank else [])]) + "\n")
    assert logs_of(run).warnings == [
        ("a.py:3: UserWarning: slow", "2 ranks, 4 times"),
        ("WARNING: only here", "rank 1"),
    ]
    run.rank_log(0).write_text("".join(f"warning {number}\n" for number in range(100)))
    assert len(logs_of(run).warnings) == MOST_WARNINGS


def test_the_ends_are_those_of_rank_0_and_of_the_rank_that_failed(make_run: MakeRun) -> None:
    run = make_run(steps=60, summary={"status": "failed", "error": {"rank": 2, "message": "out of luck"}})
    for rank in range(3):
        run.rank_log(rank).write_text("".join(f"rank {rank} line {number}\n" for number in range(1000)))
    assert load_run(run).failed_rank == 2
    ends = dict(logs_of(run, 2).ends)
    assert list(ends) == ["rank-0.log", "rank-2.log"]
    assert ends["rank-2.log"].splitlines() == [f"rank 2 line {number}" for number in range(1000 - SHOWN_LINES, 1000)]
    words = page_of(run).words
    assert "End of rank-2.log" in words and "rank 2 line 999" in words and "rank 1 line 999" not in words


def test_of_a_long_log_the_last_whole_lines_are_read(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "READ_BYTES", 25)
    run = make_run(steps=60)
    run.rank_log(0).write_text("warning a\nwarning b\nwarning c\nend\n")
    assert logs_of(run).ends == [("rank-0.log", "warning b\nwarning c\nend")]


def test_a_log_steers_nothing_and_tells_no_secret(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    text = (
        "\x1b[31mred\x1b[0m \x1b]0;title\x07\x08 logger.wandb.api_key=s3cr3t 'hf_token': s3cr3t kept=yes\n 10%\r 99%\n"
    )
    run.rank_log(0).write_text(text)
    ((_, end),) = logs_of(run).ends
    assert "s3cr3t" not in end and end.count("(hidden)") == 2 and "kept=yes" in end
    assert "red \ufffd" in end and end.splitlines()[-1] == " 99%"


def test_a_log_that_is_no_file_is_a_problem_and_not_read(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(steps=60)
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cr3t")
    os.mkfifo(run.rank_log(0))
    run.rank_log(1).symlink_to(secret)
    words = page_of(run).words
    assert "rank-0.log" in words and "rank-1.log" in words and "s3cr3t" not in words


def test_the_settings_are_those_that_the_schema_has_otherwise(make_run: MakeRun) -> None:
    run = make_run(steps=60, overrides=("model.config.hidden_size=256",), config={"data": {"seq_len": 256}})
    table = changed_defaults(load_run(run))
    assert table is not None
    rows = {key: (value, default) for key, value, default in table["rows"]}
    assert rows["optimizer.lr"] == ("0.003", "0.0003")
    assert rows["model.config.hidden_size"] == ("256", "\u2013"), "an open section's, since it was typed"
    assert not {"data.seq_len", "model.config.vocab_size", "run.name"} & set(rows)


def test_the_steps_times_and_the_rest_add_up_to_the_wall_time(make_run: MakeRun) -> None:
    run = make_run(steps=60, summary={"wall_s": 100.0})
    rows = run.metrics.read_text().splitlines()
    at = rows[0].split(",").index("throughput/step_s")
    changed = [rows[0]]
    for number, row in enumerate(rows[1:], 1):
        cells = row.split(",")
        cells[at] = "10.0" if number == 3 else "0.5"
        changed.append(",".join(cells))
    run.metrics.write_text("\n".join(changed) + "\n")
    assert times(load_run(run)) == {
        "a step, median": "0.5 s",
        "1 step in 20 takes over": "0.5 s",
        "slowest": "10 s, step 3",
        "all steps": "40 s",
        "start, evaluation, saving": "1 min 0 s, 60% of all",
    }


def test_a_comparison_leaves_out_what_is_of_one_run(make_run: MakeRun) -> None:
    runs = [make_run(steps=60, name=name) for name in ("a", "b")]
    runs[0].rank_log(0).write_text("warning\n")
    write_report(runs, runs[0].report)
    assert "Where the time went" not in runs[0].report.read_text()


def test_the_samples_of_each_prompt_are_shown_over_training(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    prompt = "def read_lines(path"
    for step in (20, 40, 60):
        append_samples(run.samples, step, [{"prompt": prompt, "text": f"<b>after {step}"}])
    words = page_of(run).words
    shown = words.split("Samples")[1]
    assert f"{prompt} step 60 ): with open" in shown, "the summary's last sample is the last"
    assert "Earlier in training (2) step 40 <b>after 40 step 20 <b>after 20" in shown
    assert "after 60" not in shown
    run.summary.unlink()
    assert "step 60 <b>after 60 Earlier in training (2)" in page_of(run).words
    assert "after 20" not in page_of(run, make_run(steps=60, name="other")).words


def of_three_attempts(make_run: MakeRun) -> RunPaths:
    """A run under ddp, killed, under zero2, and under tensor parallelism of two."""
    run = make_run(steps=60, summary={"wall_s": 170.0, "attempts": 3})
    config = yaml.safe_load(run.config.read_text())
    under = ({"name": "ddp"}, {"name": "zero2"}, {"name": "megatron", "tp": 2, "dp_shard": "auto"})
    for attempt, strategy in enumerate(under, 1):
        text = yaml.safe_dump({**config, "strategy": strategy})
        (run.root / f"config-attempt-{attempt}.yaml").write_text(text)
    killed = {"attempt": 2, "launched": 1772460433.0, "started": 1772460434.0, "ended": 1772460483.0, "lost_s": 12.0}
    entries = [
        {
            "attempt": 1,
            "launched": 1772460333.0,
            "ended": 1772460433.0,
            "status": "stopped",
            "step": 20,
            "wall_s": 100.0,
        },
        {**killed, "status": "failed", "cause": history.KILLED, "step": 33, "from_step": 20},
        {
            "attempt": 3,
            "launched": 1772460533.0,
            "ended": 1772460553.0,
            "status": "finished",
            "step": 60,
            "wall_s": 20.0,
        },
    ]
    run.attempts.write_text(json.dumps(entries))
    return run


def test_attempts_are_counted_timed_and_named_with_their_strategies(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run, under = of_three_attempts(make_run), "ddp, then zero2, then megatron tp=2"
    view = load_run(run)
    card = next(card for card in figures(view) if card["label"] == "Wall time")
    assert (card["value"], card["note"]) == ("2 min 50 s", "3 attempts, 12 s of work lost")
    table = next(block["table"] for block in blocks(view) if block["title"] == "Attempts")
    rows = [dict(zip(table["names"], row, strict=True)) for row in table["rows"]]
    assert [row["took"] for row in rows] == ["1 min 40 s", "50 s", "20 s"]
    assert [row["to step"] for row in rows] == ["20", "33", "60"] and rows[1]["cause"] == history.KILLED
    assert f"strategy {under}" in subtitle(view)[1]
    after_table(view.summary)
    assert "2 min 50 s, 3 attempts together" in capsys.readouterr().out
    run.summary.unlink()
    assert load_run(run).wall_s == 170.0 and load_run(run).num_attempts == 3, "also of a run that was killed"


def test_a_comparison_names_every_strategy_of_a_runs_attempts(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, under = [of_three_attempts(make_run), make_run(name="other", steps=60)], "ddp, then zero2, then megatron tp=2"
    words = page_of(*runs).words
    assert under in words
    runs_table(runs)
    first = capsys.readouterr().out.split("other")[0]
    assert all(name in first for name in ("ddp", "zero2", "megatron tp=2")), first


def test_times_and_shares_are_written_to_be_read(make_run: MakeRun) -> None:
    times = {"step_s": [1.5, 0.141], "data_s": [0.000749, 0.0]}
    view = load_run(make_run(steps=6, summary={"times": times, "metrics": {"throughput/padding": 0.0}}))
    (table,) = (block["table"] for block in blocks(view) if block["title"] == "Time of each rank's step")
    assert table["rows"] == [["0", "1.5 s", "0.749 ms"], ["1", "0.141 s", "0 s"]]
    (metrics,) = (block["parts"][0]["rows"] for block in blocks(view) if block["title"] == "Final metrics")
    assert ("throughput/padding", "0") in metrics


@pytest.mark.parametrize(("size", "wide"), [((8, 8), False), ((20, 10), False), ((60, 8), True)])
def test_a_strip_of_frames_gets_the_width_of_the_page(make_run: MakeRun, size: tuple[int, int], wide: bool) -> None:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", *size)
    sample = {"prompt": "a", "text": "b", "image": base64.b64encode(header + bytes(20)).decode()}
    (shown,) = samples([load_run(make_run(steps=6, summary={"samples": [sample]}))])
    assert shown["wide"] is wide
