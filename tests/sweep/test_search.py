"""Search and pruning. Oracles: a function whose best is known, and the rules written out.

The runs are stand-ins, which write the summary that training to that step would give: what is tried, in which order,
to which step is what is tested here. tests/sweep/test_sweeps.py searches and prunes with real runs.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.runs.resume_command import CommandLine
from mgpu_pipe.sweep import parallel
from mgpu_pipe.sweep import run_points as work
from mgpu_pipe.sweep import start_sweep as extending
from mgpu_pipe.sweep.run_points import read_points
from mgpu_pipe.sweep.search import Tried, promoted_trials, rungs_of, suggest
from mgpu_pipe.sweep.space import order_by_conditions, parameter
from mgpu_pipe.sweep.start_sweep import errors_by_point
from mgpu_pipe.sweep.store import Store, create, stores
from tests.support.no_launch import Result, launches_by
from tests.sweep.support import asked

SPACE = [
    parameter("optimizer.lr", "tag(log,interval(1e-5,1e-1))"),
    parameter("scheduler.warmup_steps", "interval(0,20)"),
    parameter("optimizer", "adamw,sgd"),
    parameter("optimizer.options.momentum", {"low": 0.1, "high": 0.9, "when": {"optimizer": "sgd"}}),
]
BASE = ["-m", "model=llama_tiny", "trainer.accelerator=cpu", "data=synthetic", "logger=none", "trainer.max_steps=27"]


def loss(rate: float, step: int) -> float:
    """The best rate is 1e-3; more steps are better, and never change the order."""
    return 2 + abs(math.log10(rate) + 3) + 1 / step


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunConfig]:
    """A launcher that trains nothing; rates above 0.05 end by a NaN."""
    seen: list[RunConfig] = []

    def launch(config: RunConfig, asked: CommandLine) -> Result:
        seen.append(config)
        folder = Path(config.run.dir) if config.run.dir else tmp_path / "runs" / str(len(seen))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").touch()  # a run's folder has one
        asked.chosen(folder)
        bad = config.optimizer.lr > 0.05
        value = loss(config.optimizer.lr, config.trainer.max_steps or 0)
        summary = {
            "status": "failed" if bad else "finished",
            "step": config.trainer.max_steps,
            "world_size": 1,
            "metrics": {} if bad else {"val/loss": value, "train/loss": value},
            "error": {"type": "NonFiniteError", "message": "the loss is not finite"} if bad else None,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return Result(str(summary["status"]), int(bad), folder)

    launches_by(monkeypatch, launch)
    monkeypatch.chdir(tmp_path)
    return seen


def the_sweep() -> Store:
    (store,) = stores(Path("outputs"))
    return store


def cost(chosen: dict[str, str]) -> float:
    rate, warm_up = float(chosen["optimizer.lr"]), int(chosen["scheduler.warmup_steps"])
    return (math.log10(rate) + 3) ** 2 + abs(warm_up - 7) / 10 + (chosen["optimizer"] == "sgd")


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_draws_are_in_the_space_and_follow_from_seed_and_place(kind: str) -> None:
    if kind == "tpe":
        pytest.importorskip("optuna")
    tried: list[Tried] = []
    for _ in range(30):
        chosen = suggest(kind, SPACE, tried, [True], 1)  # type: ignore[arg-type]
        assert chosen == suggest(kind, SPACE, tried, [True], 1)  # type: ignore[arg-type]
        assert 1e-5 <= float(chosen["optimizer.lr"]) <= 1e-1 and 0 <= int(chosen["scheduler.warmup_steps"]) <= 20
        assert ("optimizer.options.momentum" in chosen) == (chosen["optimizer"] == "sgd")
        bad = len(tried) == 3
        tried.append(Tried(chosen, () if bad else [cost(chosen)]))
    assert len({one.chosen["optimizer.lr"] for one in tried}) == 30
    assert suggest(kind, SPACE, tried, [True], 2) != suggest(kind, SPACE, tried, [True], 1)  # type: ignore[arg-type]
    if kind == "tpe":
        late = sorted(one.values[0] for one in tried[10:])
        early = sorted(one.values[0] for one in tried[:10] if one.values)
        assert late[len(late) // 2] < early[len(early) // 2], "it learns"


@pytest.mark.parametrize(("kind", "minimize"), [("gp", [True]), ("nsga2", [True, False])])
def test_the_other_samplers_learn_from_the_same_store(kind: str, minimize: list[bool]) -> None:
    pytest.importorskip("optuna")
    if kind == "gp":
        pytest.importorskip("scipy")
    tried: list[Tried] = []
    for _ in range(12):
        chosen = suggest("random", SPACE[:2], tried, minimize, 1)
        value = (math.log10(float(chosen["optimizer.lr"])) + 3) ** 2
        tried.append(Tried(chosen, [value, -value][: len(minimize)]))
    chosen = suggest(kind, SPACE[:2], tried, minimize, 1)  # type: ignore[arg-type]
    assert set(chosen) == {"optimizer.lr", "scheduler.warmup_steps"}
    assert suggest(kind, SPACE[:2], [*tried, Tried(chosen, ended=False)], minimize, 1) != chosen  # type: ignore[arg-type]


def test_nsga2_breeds_from_the_best() -> None:
    pytest.importorskip("optuna")
    tried: list[Tried] = []
    for _ in range(60):
        chosen = suggest("nsga2", SPACE[:2], tried, [True, True], 1)
        rate, warm_up = math.log10(float(chosen["optimizer.lr"])), int(chosen["scheduler.warmup_steps"])
        tried.append(Tried(chosen, [abs(rate + 3), abs(rate + 3) + warm_up / 20]))
    first, last = ([math.fsum(one.values) for one in part] for part in (tried[:10], tried[-20:]))
    assert math.fsum(last) / 20 < 0.6 * math.fsum(first) / 10


def test_an_end_of_many_digits_is_in_its_range() -> None:
    pytest.importorskip("optuna")
    space = [parameter("optimizer.lr", {"low": 0.01 / 3, "high": 0.12345678})]
    for text in space[0].ends:  # of six digits, and a little outside
        assert suggest("tpe", space, [Tried({"optimizer.lr": text}, [1.0])], [True], 1)


def test_a_condition_holds_whatever_the_order_and_one_that_never_does_is_refused() -> None:
    wanted = {
        "optimizer.options.nesterov": {"values": [True, False], "when": {"optimizer": "sgd"}},
        "optimizer.options.momentum": {"low": 0.1, "high": 0.9, "when": {"optimizer.options.nesterov": True}},
        "optimizer": ["adamw", "sgd"],
    }
    space = order_by_conditions({key: parameter(key, value) for key, value in wanted.items()})
    assert [one.key for one in space] == ["optimizer", "optimizer.options.nesterov", "optimizer.options.momentum"]
    drawn = [suggest("random", space, [Tried({})] * place, [True], 1) for place in range(40)]
    assert {len(one) for one in drawn} == {1, 2, 3}
    for when in ({"optimizer": "sdg"}, {"nothing": 1}, {"a.b": "1"}):
        one = parameter("a.b", {"values": [1, 2], "when": when})
        with pytest.raises(ConfigError, match=r"sweep.space.a.b.when.* never holds|depend on each other"):
            order_by_conditions({"a.b": one, "optimizer": space[0]})


def test_texts_of_a_space_and_of_a_file_are_quoted_where_they_have_to_be(tmp_path: Path) -> None:
    texts = ["a,b", "c d", "it's", "e=f", "[1,2]", "é"]
    values = parameter("run.name", texts).values
    assert values == ("'a,b'", r"c\ d", r"'it\'s'", "'e=f'", "[1,2]", "é")
    cells = [f'"{text}"' for text in texts]
    (tmp_path / "points.csv").write_text("\ufeffrun.name\n\n" + "\n".join(cells) + "\n", encoding="utf-8")
    assert read_points(tmp_path / "points.csv") == [[f"run.name={value}"] for value in values]
    (tmp_path / "torn.csv").write_text("run.name,seed\n\na,1\nb\n")
    with pytest.raises(ConfigError, match="line 4 has 1 values for 2 keys"):
        read_points(tmp_path / "torn.csv")


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("interval(1e-2,1e-5)", "a low and a higher end"),
        ("tag(log,interval(0,1))", "begin above 0"),
        ([], "the space is empty"),
        ({"values": []}, "the space is empty"),
        ({"low": 1, "top": 2}, "no such entry"),
        (3, "write interval"),
    ],
)
def test_an_empty_or_unreadable_space_is_refused(value: object, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        parameter("optimizer.lr", value)


@pytest.mark.slow
def test_a_search_draws_its_trials_and_goes_on_after_more(launches: list[RunConfig]) -> None:
    words = [
        *BASE,
        "sweep.search=random",
        "sweep.trials=6",
        "optimizer.lr=tag(log,interval(1e-5,1e-2))",
        "sweep.name=s",
    ]
    assert cli.main([*words, "sweep.metric=val/loss", "scheduler.warmup_steps=0,3"]) == 0
    store = the_sweep()
    assert [point.status for point in store.points()] == ["finished"] * 6
    assert [config.optimizer.lr for config in launches] == [float(p.settings["optimizer.lr"]) for p in store.points()]
    assert {config.scheduler.warmup_steps for config in launches} == {0, 3}
    assert cli.main(["sweeps", "extend", "s", "sweep.trials=8"]) == 0
    assert len(launches) == 8 and len(store.points()) == 8
    assert cli.main(["sweeps", "extend", "s", "sweep.trials=5"]) == 2
    assert cli.main(["sweeps", "best", "s"]) == 0


def test_a_space_with_a_point_that_cannot_run_is_refused_before_anything_starts(
    launches: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*BASE, "sweep.search=random", "sweep.space.optimizer.lr=interval(1e-5,1e-2)"]
    assert cli.main([*words, "data.global_batch_size=choice(8,9)", "strategy=ddp", "trainer.devices=2"]) == 2
    assert "data.global_batch_size=9: not divisible" in capsys.readouterr().err
    assert cli.main([*BASE, "sweep.search=random"]) == 2
    assert "the space is empty" in capsys.readouterr().err
    assert not launches and not list(Path().glob("outputs/sweeps/*"))


@pytest.mark.slow
def test_asha_promotes_by_resume_and_spends_little(launches: list[RunConfig]) -> None:
    words = [*BASE, "sweep.search=random", "sweep.trials=9", "sweep.pruner=asha", "sweep.name=s"]
    assert cli.main([*words, "sweep.metric=val/loss", "optimizer.lr=tag(log,interval(1e-5,1e-2))"]) == 0
    points = the_sweep().points()
    (best,) = [point for point in points if point.status == "finished"]
    assert {point.status for point in points if point is not best} == {"pruned"}
    rate = {point.number: float(point.settings["optimizer.lr"]) for point in points}
    assert best.number == min(rate, key=lambda number: abs(math.log10(rate[number]) + 3))
    assert best.rungs == {step: loss(rate[best.number], step) for step in (3, 9, 27)} and best.attempts == 3
    assert sum(max(point.rungs) for point in points) <= 0.4 * 9 * 27
    assert {config.scheduler.total_steps for config in launches} == {27}, "the schedule has the whole length"
    again = [config for config in launches if config.run.dir == best.folder]
    assert [config.trainer.max_steps for config in again] == [9, 27]
    assert all(config.checkpoint.resume == "auto" for config in again)
    pruned = next(point for point in points if point.status == "pruned")
    assert json.loads((Path(pruned.folder) / "summary.json").read_text())["status"] == "pruned"


@pytest.mark.slow
def test_a_sweep_of_few_trials_trains_its_best_one_to_the_end(launches: list[RunConfig]) -> None:
    words = [*BASE, "sweep.pruner=asha", "sweep.name=s", "sweep.metric=val/loss", "optimizer.lr=1e-4,2e-3"]
    assert cli.main(words) == 0
    first, second = the_sweep().points()
    assert (first.status, second.status) == ("pruned", "finished")
    assert [config.trainer.max_steps for config in launches] == [3, 3, 9, 27]


@pytest.mark.slow
def test_seeds_are_added_to_every_point(launches: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    rates = "optimizer.lr=1e-4,1e-3"
    assert cli.main([*BASE, rates, "sweep.metric=val/loss", "sweep.name=s", "seed=7"]) == 0
    for seeds in (3, 4):
        assert cli.main(["sweeps", "extend", "s", f"sweep.seeds={seeds}"]) == 0
        points = the_sweep().points()
        by_rate = {(config.optimizer.lr, config.seed) for config in launches}
        assert by_rate == {(rate, 7 + at) for rate in (1e-4, 1e-3) for at in range(seeds)} and len(launches) == len(
            points
        )
        assert {point.settings["optimizer.lr"]: point.trial for point in points} == {"0.0001": 1, "0.001": 2}
    capsys.readouterr()
    assert cli.main(["sweeps", "best", "s"]) == 0 and "over 4 seeds" in capsys.readouterr().out
    assert cli.main(["sweeps", "extend", "s", "optimizer.lr=1e-4,1e-2"]) == 0
    assert len(launches) == 12 and len(the_sweep().points()) == 12, "1e-4 is there, without a seed in its words"
    assert cli.main(["sweeps", "extend", "s", "sweep.seeds=4"]) == 2
    assert "give sweep.seeds=N alone, above 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pruner_and_several_seeds_are_refused(launches: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BASE, "optimizer.lr=1e-4,1e-3", "sweep.pruner=asha", "sweep.metric=val/loss"]
    assert cli.main([*words, "sweep.seeds=2"]) == 2 and not launches
    assert "sweep.pruner=asha: it ranks single runs; use one metric and sweep.seeds=1" in capsys.readouterr().err
    assert cli.main([*words, "sweep.name=s"]) == 0
    assert cli.main(["sweeps", "extend", "s", "sweep.seeds=2"]) == 2
    assert "sweep.pruner ranks single runs" in capsys.readouterr().err


@pytest.mark.slow
def test_what_ended_badly_and_what_was_cancelled_is_run_by_retry_alone(
    launches: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*BASE, "optimizer.lr=0.06,0.07,1e-3", "sweep.metric=val/loss", "sweep.name=s"]
    assert cli.main(words) == 1
    store = the_sweep()
    (added,) = store.add([[["optimizer.lr=2e-3"]]])
    assert cli.main(["sweeps", "cancel", "s"]) == 0 and "cancelled: 1 of 4 runs" in capsys.readouterr().out
    assert [point.status for point in store.points()] == ["diverged", "diverged", "finished", "cancelled"]
    assert cli.main(["sweeps", "resume", "s"]) == 1 and len(launches) == 3
    assert cli.main(["sweeps", "retry", "s", "2"]) == 1
    assert [point.attempts for point in store.points()] == [1, 2, 1, 0]
    assert launches[3].run.dir == store.points()[1].folder and launches[3].checkpoint.resume == "auto"
    assert cli.main(["sweeps", "retry", "s"]) == 1
    assert [point.attempts for point in store.points()] == [2, 3, 1, 1]
    assert store.points()[added.number - 1].status == "finished"
    for number, told in (
        ("3", "retry s 3: it is finished; retry takes failed"),
        ("x", "x is not the number of a point"),
    ):
        assert cli.main(["sweeps", "retry", "s", number]) == 2 and told in capsys.readouterr().err


def test_a_search_is_cancelled_also_between_two_runs(
    launches: list[RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cancelled(*given: Any) -> dict[str, str]:
        """While the third trial is chosen, which takes a sampler long."""
        if len(given[2]) == 2 and not the_sweep().cancelled:
            assert cli.main(["sweeps", "cancel", "s"]) == 0
        return suggest(*given)

    monkeypatch.setattr(work, "suggest", cancelled)
    space = ["sweep.metric=val/loss", "optimizer.lr=interval(1e-4,1e-3)"]
    assert cli.main([*BASE, "sweep.search=random", "sweep.trials=4", "sweep.name=s", *space]) == 75
    assert len(launches) == 2
    assert cli.main(["sweeps", "resume", "s"]) == 75 and len(launches) == 2
    assert "s: was cancelled; mgpu-pipe sweeps retry brings it back" in capsys.readouterr().err
    assert cli.main(["sweeps", "retry", "s"]) == 0 and len(launches) == 4


@pytest.mark.slow
def test_several_processes_run_the_points_that_retry_asks_for(
    launches: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in name: each runs in this one, as soon as it is started."""

    class Here:
        def __init__(self, command: list[str], env: dict[str, str], **streams: object) -> None:
            with monkeypatch.context() as inside:
                inside.setenv(parallel.WORKER, env[parallel.WORKER])
                self.returncode = cli.main(command[command.index("mgpu_pipe") + 1 :])
            self.pid, self.poll = 0, lambda: self.returncode

    monkeypatch.setattr(subprocess, "Popen", Here)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    words = ["optimizer.lr=0.06,0.07,1e-3", "sweep.metric=val/loss", "sweep.name=s", "sweep.parallel=2"]
    assert cli.main([*BASE, *words]) == 1
    assert cli.main(["sweeps", "retry", "s", "2"]) == 1
    assert [point.attempts for point in the_sweep().points()] == [1, 2, 1]
    assert cli.main(["sweeps", "retry", "s"]) == 1
    assert [point.attempts for point in the_sweep().points()] == [2, 3, 1]


def test_what_reaches_no_number_at_a_rung_has_diverged(tmp_path: Path) -> None:
    store = create(tmp_path, "s", asked(rungs=[3, 9]), [[["seed=1"]], [["seed=2"]]])
    (tmp_path / "run").mkdir()
    summary = {"status": "finished", "step": 3, "metrics": {"train/loss": 2.0, "val/loss": None}}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    taken = work.take(store, store.points()[0], budget=3)
    assert taken is not None
    taken = store.change(taken, folder=str(tmp_path / "run"))
    assert taken is not None and work.record_outcome(store, taken, 0, 1.0) == 1
    assert store.points()[0].status == "diverged" and "val/loss is no number at step 3" in store.points()[0].reason
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "diverged"


@pytest.mark.slow
def test_two_extensions_at_once_add_a_point_once(
    launches: list[RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*BASE, "optimizer.lr=1e-3,5e-3", "sweep.metric=val/loss", "sweep.name=s"]) == 0

    def another(*given: Any) -> dict[int, list[BadInputError]]:
        """Does the same, while we check the points."""
        if len(the_sweep().points()) == 2:
            the_sweep().add([[["optimizer.lr=0.002"]]])
        return errors_by_point(*given)

    monkeypatch.setattr(extending, "errors_by_point", another)
    assert cli.main(["sweeps", "extend", "s", "optimizer.lr=2e-3"]) == 2
    assert "has these points already" in capsys.readouterr().err and len(the_sweep().points()) == 3
    assert cli.main(["sweeps", "extend", "s", "optimizer.lr=2e-3,3e-3"]) == 0
    assert [float(point.settings["optimizer.lr"]) for point in the_sweep().points()] == [1e-3, 5e-3, 2e-3, 3e-3]


@pytest.mark.slow
def test_what_diverges_is_no_end_of_a_search(launches: list[RunConfig]) -> None:
    words = [*BASE, "sweep.search=random", "sweep.trials=8", "sweep.seeds=1", "sweep.metric=val/loss"]
    assert cli.main([*words, "optimizer.lr=interval(0.01,0.1)"]) == 1
    points = the_sweep().points()
    assert {point.status for point in points} == {"finished", "diverged"} and len(points) == 8
    for point in points:
        assert (point.status == "diverged") == (float(point.settings["optimizer.lr"]) > 0.05)


@pytest.mark.slow
def test_a_sweep_that_hydra_runs_itself_is_stored_too(launches: list[RunConfig]) -> None:
    callback = "+hydra.callbacks.log._target_=hydra.experimental.callbacks.LogJobReturnCallback"
    assert cli.main([*BASE, "seed=1,2", "sweep.name=s", callback]) == 0
    points = the_sweep().points()
    assert [point.status for point in points] == ["finished"] * 2 and len(launches) == 2
    assert [point.overrides for point in points] == [("seed=1",), ("seed=2",)]


def test_rungs_and_rules() -> None:
    assert rungs_of(27) == [3, 9, 27] and rungs_of(100, [50, 10, 100, 200]) == [10, 50, 100]
    reached = {number: {3: float(number)} for number in range(1, 7)}
    assert promoted_trials(reached, [3, 9, 27], True, "asha") == [1, 2]
    assert promoted_trials(reached, [3, 9, 27], False, "asha") == [6, 5]
    assert promoted_trials({**reached, 1: {3: 1.0, 9: 1.0}}, [3, 9, 27], True, "asha") == [2], "none twice"
    two_up = {**reached, **{n: {3: float(n), 9: float(n)} for n in (1, 2, 3)}}
    assert promoted_trials(two_up, [3, 9, 27], True, "asha") == [1], "the one nearest to the end first"
    assert promoted_trials(reached, [3, 9], True, "median") == [1, 2, 3]
    assert promoted_trials({1: {3: 9.0}}, [3, 9], True, "median") == [1], "one alone is not below the others"
