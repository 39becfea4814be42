"""Outcomes of points, what is recorded of them, the best of them, and stores that are odd."""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
from pathlib import Path

import pytest

from benchmarks.accuracy.sweep_search import FIRST, SAMPLED, SEEDS, asha, curves, loss, regret
from benchmarks.support import RESULTS
from mgpu_pipe.cli import main as cli
from mgpu_pipe.errors import EXIT_STOPPED
from mgpu_pipe.launch.micro_batch_tries import MicroBatchStoppedError
from mgpu_pipe.sweep import parallel
from mgpu_pipe.sweep.best import pareto, rank_trials, repeat_line
from mgpu_pipe.sweep.point import FINISHED, SPEC_ENTRIES, Point, as_record
from mgpu_pipe.sweep.store import create
from mgpu_pipe.sweep.sweep_outcome import outcome, refuse_point
from scripts.sweep_curves import STEPS, grid
from tests.sweep.support import asked


@pytest.mark.parametrize(
    ("code", "kind", "message", "short", "status"),
    [
        (0, "", "", False, "finished"),
        (75, "", "", False, "stopped"),
        (1, "NonFiniteError", "the loss is not finite at step 3", False, "diverged"),
        (1, "OutOfMemoryError", "rank 0 ran out of memory", False, "out_of_memory"),
        (1, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried", False, "out_of_memory"),
        (1, "WorkerError", "killed by SIGKILL (the kernel does that when memory runs out)", True, "out_of_memory"),
        (1, "WorkerError", "killed by SIGKILL (the kernel does that when memory runs out)", False, "interrupted"),
        (1, "KeyError", "'x'", False, "failed"),
    ],
)
def test_an_end_has_a_name(code: int, kind: str, message: str, short: bool, status: str) -> None:
    summary = {"error": {"type": kind, "message": message}} if kind else {"metrics": {"train/loss": 9.0}}
    assert outcome(code, summary, short)[0] == status
    assert outcome(code, summary, short, bound=8.0)[0] == ("diverged" if status == "finished" else status)


def test_a_point_that_was_stopped_before_its_run_is_no_failure(tmp_path: Path) -> None:
    store = create(tmp_path, "s", asked(), [[["seed=1"]]])
    assert refuse_point(store, store.points()[0], MicroBatchStoppedError("stopped")) == EXIT_STOPPED
    assert store.points()[0].status == "stopped"


def test_the_front_of_two_metrics() -> None:
    reached = {1: (10.0, 1.0), 2: (20.0, 2.0), 3: (15.0, 2.5), 4: (20.0, 2.0)}
    points = [
        Point(number, (), number, status="finished", metrics={"speed": speed, "memory": memory})
        for number, (speed, memory) in reached.items()
    ]
    points.append(Point(5, (), 5, status="out_of_memory", metrics={"speed": 99.0, "memory": 0.0}))
    points.append(Point(6, (), 6, status="finished", metrics={"speed": 99.0}))
    assert [point.number for point in pareto(points, ["speed", "memory"], [False, True])] == [2, 4, 1]


def runs(trial: int, *values: float, status: str = "finished") -> list[Point]:
    return [
        Point(trial * 10 + at, (f"optimizer.lr={trial}",), trial, status=status, metrics={"val/loss": value})
        for at, value in enumerate(values)
    ]


def test_the_mean_counts_with_its_interval() -> None:
    first, second = [2.0, 2.2, 2.4], [1.0, 1.2, 1.1]
    best, other = rank_trials([*runs(1, *first), *runs(2, *second)], "val/loss", minimize=True)
    assert [best.first.trial, other.first.trial] == [2, 1] and not other.alike
    spread = math.sqrt((statistics.variance(first) + statistics.variance(second)) / 2)
    assert math.isclose(best.mean, statistics.mean(second))
    assert math.isclose(best.error, 2.78 * spread / math.sqrt(3))


def test_a_lucky_run_does_not_win_over_a_mean() -> None:
    trials = rank_trials([*runs(1, 1.99), *runs(2, 2.0, 2.1, 1.9), *runs(3, 9.0, 9.2)], "val/loss", minimize=True)
    assert [trial.first.trial for trial in trials] == [2, 1, 3]
    assert [trial.alike for trial in trials] == [False, True, False]


def test_trials_with_a_run_that_did_not_finish_are_left_out() -> None:
    points = [*runs(1, 1.0), *runs(1, 1.0, status="diverged"), *runs(2, 3.0), *runs(3, math.nan)]
    assert [trial.first.trial for trial in rank_trials(points, "val/loss", minimize=True)] == [2]


def test_higher_may_be_better() -> None:
    trials = rank_trials([*runs(1, 0.2), *runs(2, 0.9)], "val/loss", minimize=False)
    assert trials[0].first.trial == 2 and math.isnan(trials[0].error)


def test_the_command_that_repeats_a_point_asks_for_no_sweep(tmp_path: Path) -> None:
    store = create(tmp_path, "mine", asked(fixed=["model=llama_tiny", "sweep.search=tpe", "+sweep.space.seed=[1,2]"]))
    (point,) = store.add([[["seed=2"]]])
    assert repeat_line(store, point) == "mgpu-pipe model=llama_tiny seed=2"


FIGURES = {row["what"]: row for row in json.loads((RESULTS / "sweep_search-cpu.json").read_text())["rows"]}


def test_the_table_is_interpolated_between_its_runs() -> None:
    points = grid()
    assert len(curves()) == 300
    for point in points[::37]:
        assert loss(point) == pytest.approx(curves()[point][STEPS], rel=1e-9)
    rate, decay, _ = points[0]
    ends = curves()[rate, decay, 12.0][STEPS], curves()[rate, decay, 24.0][STEPS]
    assert loss((rate, decay, 18.0)) == pytest.approx(statistics.mean(ends), rel=1e-9)


@pytest.mark.slow
def test_tpe_finds_better_runs_than_random_draws() -> None:
    pytest.importorskip("optuna")
    for seeds in ("mean regret after 30 trials, tpe", f"tpe, of the first {FIRST} seeds alone"):
        assert FIGURES[seeds]["ratio"] <= 0.7
    sampled = statistics.mean(regret("tpe", seed) for seed in range(SAMPLED))
    committed = FIGURES[f"tpe, of the first {SAMPLED} seeds"]["value"]
    assert sampled == pytest.approx(committed, rel=1e-6), "the figures are this code's"


@pytest.mark.exhaustive
def test_tpes_regret_over_all_seeds() -> None:
    pytest.importorskip("optuna")
    tpe, drawn = (statistics.mean(regret(kind, seed) for seed in range(SEEDS)) for kind in ("tpe", "random"))
    assert tpe <= 0.7 * drawn


def test_asha_spends_little_and_ends_near_the_best() -> None:
    shares, excesses = zip(*(asha(seed) for seed in range(5)), strict=True)
    assert max(shares) <= 0.4 and max(excesses) <= 0.02


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
