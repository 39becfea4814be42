"""Sweeps of real runs that are killed, resumed, extended. Oracle: the undisturbed sweep, metric by metric."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.sweep.store import Store, create, find
from tests.support.command import column, environment, launched, mgpu, run_folder, workers_of
from tests.support.program import run_program
from tests.sweep.support import TINY, asked, losses, status_of, until


def sweep_words(root: Path, rates: str, *more: str) -> list[str]:
    return ["-m", *TINY, f"optimizer.lr={rates}", f"run.root={root}", "sweep.name=mine", *more]


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_sweep_that_was_killed_is_finished_and_no_point_runs_twice(cache: Path, tmp_path: Path, count: int) -> None:
    whole = count - 1
    rates = ",".join([*(f"{at + 1}e-3" for at in range(whole)), "1e18"])
    more = ("trainer.max_steps=12", "checkpoint.every_n_steps=2", "trainer.gradient_clip_val=null", "run.name=p")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    mgpu(cache, tmp_path, *sweep_words(undisturbed, rates, *more), code=1)
    truth = find(undisturbed, "mine")
    assert [point.status for point in truth.points()] == ["finished"] * whole + ["diverged"]

    program = launched(cache, tmp_path, *sweep_words(killed, rates, *more))
    folder, at = killed / "sweeps" / "mine", count // 2 - 1
    until(lambda: (folder / "sweep.json").exists() and Store(folder).points()[at].folder != "", 600)
    store = Store(folder)
    second = Path(store.points()[at].folder)
    until(lambda: (second / "metrics.csv").exists() and len((second / "metrics.csv").read_text().splitlines()) > 5)
    os.kill(workers_of(program)[0], signal.SIGKILL)  # a worker: the sweep goes on with the next point
    until(lambda: store.points()[at + 1].folder != "")
    third = Path(store.points()[at + 1].folder)
    until(lambda: (third / "metrics.csv").exists() and len((third / "metrics.csv").read_text().splitlines()) > 4)
    program.kill()  # and the parent
    left = count - at - 2
    assert [point.status for point in store.points()] == ["finished"] * at + ["interrupted"] * 2 + ["waiting"] * left

    out = run_program(["sweeps", "resume", "mine", f"run.root={killed}"], tmp_path, environment(cache), 600)
    assert out.returncode == 1, "the broken point is reported"
    assert f"run {at} of {count}" not in out.stderr and f"run {at + 1} of {count}" in out.stderr
    points = store.points()
    assert [point.status for point in points] == ["finished"] * whole + ["diverged"]
    assert "is not finite" in points[-1].reason and status_of(points[-1].folder) == "diverged"
    assert [point.attempts for point in points] == [1] * at + [2, 2] + [1] * left
    assert Path(points[at].folder) == second and Path(points[at + 1].folder) == third
    assert len(list((killed / "p").iterdir())) == count, "each point has one folder"
    assert losses(store) == losses(truth)
    for mine, theirs in zip(points[:-1], truth.points()[:-1], strict=True):
        assert column(Path(mine.folder), "train/loss") == column(Path(theirs.folder), "train/loss")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_sweep_that_is_cancelled_saves_and_goes_on_by_retry_alone(cache: Path, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    words = ("trainer.max_steps=400", "run.name=p")
    program = launched(cache, tmp_path, *sweep_words(root, "1e-3,2e-3", *words))
    folder = root / "sweeps" / "mine"
    until(lambda: (folder / "sweep.json").exists() and any(point.folder for point in Store(folder).points()[:1]))
    store = Store(folder)
    first = Path(store.points()[0].folder)
    until(lambda: (first / "metrics.csv").exists() and len((first / "metrics.csv").read_text().splitlines()) > 5)
    assert "cancelled: 2 of 2 runs" in mgpu(cache, tmp_path, "sweeps", "cancel", "mine")
    program.communicate()
    assert [(point.status, point.attempts) for point in store.points()] == [("cancelled", 1), ("cancelled", 0)]
    assert status_of(str(first)) == "stopped" and 5 < store.points()[0].step < 400
    mgpu(cache, tmp_path, "sweeps", "resume", "mine")
    assert [point.attempts for point in store.points()] == [1, 0], "resume leaves it alone"
    mgpu(cache, tmp_path, "sweeps", "retry", "mine")
    assert [(point.status, point.attempts) for point in store.points()] == [("finished", 2), ("finished", 1)]
    assert list(column(first, "train/loss")) == list(range(1, 401)), "from its own checkpoint"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_resumes_at_once_share_the_points_and_the_sweep_can_be_extended(cache: Path, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    (tmp_path / "points.csv").write_text('optimizer.lr,run.tags\n1e-3,"[a,b]"\n2e-3,[c]\n')
    words = ["-m", *TINY, "trainer.max_steps=2", "sweep.points=points.csv", "sweep.seeds=2", "sweep.name=mine"]
    first = launched(cache, tmp_path, *words)
    until(lambda: (root / "sweeps" / "mine" / "sweep.json").exists() and len(find(root, "mine").points()) == 4)
    second = launched(cache, tmp_path, "sweeps", "resume", "mine")
    ends = [program.communicate() for program in (first, second)]
    assert (first.returncode, second.returncode) in ((0, 0), (75, 0), (0, 75)), ends
    store = find(root, "mine")
    begun = re.findall(r"^run (\d) of 4", ends[0][1] + ends[1][1], re.MULTILINE)
    assert sorted(begun) == ["1", "2", "3", "4"]
    points = store.points()
    assert [point.status for point in points] == ["finished"] * 4 and {point.attempts for point in points} == {1}
    assert points[0].settings == {"optimizer.lr": "0.001", "run.tags": "[a,b]", "seed": "1234"}
    assert [point.trial for point in points] == [1, 1, 3, 3]

    mgpu(cache, tmp_path, "sweeps", "extend", "mine", "optimizer.lr=2e-3,5e-3", "run.tags=[c]")
    points = store.points()
    assert [point.settings["optimizer.lr"] for point in points[4:]] == ["0.005", "0.005"]
    said = mgpu(cache, tmp_path, "sweeps", "best", "mine")
    assert "over 2 seeds" in said and "repeat it: mgpu-pipe" in said


@pytest.mark.slow
def test_a_pruned_search_of_real_runs_goes_on_from_their_checkpoints(cache: Path, tmp_path: Path) -> None:
    words = ["-m", *TINY, "trainer.max_steps=9", "sweep.search=tpe", "sweep.trials=8", "sweep.pruner=asha"]
    more = ["sweep.parallel=2", "sweep.name=mine", "optimizer.lr=tag(log,interval(1e-4,1e-2))", "scheduler=cosine"]
    mgpu(cache, tmp_path, *words, *more)
    points = find(tmp_path / "outputs", "mine").points()
    (best,) = [point for point in points if point.status == "finished"]
    assert sorted(best.rungs) == [1, 3, 9] and best.attempts == 3
    assert len(points) == 8 and all(1 in point.rungs for point in points)
    assert sum(point.attempts > 1 for point in points) >= 2, "a third of the eight went on"
    assert status_of(next(point for point in points if point is not best).folder) == "pruned"
    rate = f"optimizer.lr={best.settings['optimizer.lr']}"
    whole = run_folder(mgpu(cache, tmp_path, *TINY, "trainer.max_steps=9", "scheduler=cosine", rate))
    assert column(Path(best.folder), "train/loss") == column(whole, "train/loss")
    assert column(Path(best.folder), "lr") == column(whole, "lr"), "the schedule has the whole length at every rung"


def fails(tmp_path: Path, *words: str) -> int:
    return cli.main([*words, f"run.root={tmp_path}"])


@pytest.mark.slow
def test_what_is_wrong_is_told_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.csv").write_text("optimizer.lr\n")
    (tmp_path / "torn.csv").write_text("optimizer.lr,seed\n1,2,3\n")
    (tmp_path / "twice.csv").write_text("optimizer.lr,optimizer.lr\n1,2\n")
    (tmp_path / "seeds.csv").write_text("seed\n3\n")
    refused = {
        "sweep.rungs=[3]": "no point is pruned",
        "sweep.rungs=[3,9] trainer.max_steps=9 sweep.pruner=asha": "give steps from 1 to 8",
        f"sweep.points={tmp_path}/twice.csv": "optimizer.lr is the header of two columns",
        f"sweep.points={tmp_path}/seeds.csv": "the points have values of it already",
        "optimizer.lr=-3": "optimizer.lr=-3",
        "sweep.name=a/b": "plain folder name",
        "sweep.metric=val/los": "did you mean val/loss?",
        "sweep.seeds=0": "at least 1",
        "sweep.seeds=2": "seeds are swept",
        "run.root=a,b": "it is the whole sweep's",
        "optimizer.lr=interval(1e-4,1e-2)": "a range is not a list of values",
        f"sweep.points={tmp_path}/none.csv": "give a csv file",
        f"sweep.points={tmp_path}/empty.csv": "it has no point",
        f"sweep.points={tmp_path}/torn.csv": "3 values for 2 keys",
        "run.dir=here": "leave it out with -m",
        "optimizer.lr=-1,-2": "optimizer.lr=-1",
    }
    for word, fix in refused.items():
        root = () if word.startswith("run.root") else (f"run.root={tmp_path / 'outputs'}",)
        assert cli.main(["-m", "model=llama_tiny", "seed=1,2", *root, *word.split()]) == 2, word
        told = capsys.readouterr().err
        assert told.count(fix) == 1 and "Traceback" not in told, told
    words = ["-m", "model=llama_tiny", "seed=1,2", "data.validation_fraction=0", "sweep.metric=val/loss"]
    assert fails(tmp_path, *words) == 2
    assert "no data is held out" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.csv", "seeds.csv", "torn.csv", "twice.csv"]


def test_a_folder_of_hydras_is_told_to_mean_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "optimizer.lr=-1,-2", "hydra.sweep.dir=there", f"run.root={tmp_path}"]) == 2
    assert "note: hydra.sweep.dir=there: does nothing here: the sweep's folder is <run.root>" in capsys.readouterr().err


def test_the_verb_tells_what_it_does_not_understand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, fix in (
        (["list", "mine"], "takes no name"),
        (["show"], "name a sweep"),
        (["show", "mine"], "no such sweep"),
        (["resume", "mine", "x=1"], "not understood"),
        (["best", "mine", "--json"], "only works with list and show"),
    ):
        assert fails(tmp_path, "sweeps", *words) == 2
        assert fix in capsys.readouterr().err
    assert fails(tmp_path, "sweeps") == 0 and capsys.readouterr().out == "0 sweeps\n"
    assert fails(tmp_path, "sweeps", "list") == 0 and capsys.readouterr().out == "0 sweeps\n"


def test_reading_sweeps_needs_no_torch(tmp_path: Path) -> None:
    create(tmp_path, "mine", asked()).add([[["seed=1"]]])
    program = (
        "import sys\nfrom mgpu_pipe.cli import main as cli\n"
        f"assert cli.main(['sweeps', 'show', 'mine', 'run.root={tmp_path}']) == 0\n"
        "assert not {'torch', 'optuna', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
