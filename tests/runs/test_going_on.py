"""Going on by the lines that the program itself prints, and by ``checkpoint.resume=auto`` in a sweep.

The oracle is the run that was not interrupted: the same losses and learning rates, row by row.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.command import column, environment, launched, metrics, mgpu, run_folder, wait_for_step
from tests.support.program import ForkedProgram, run_program
from tests.support.sampling import one_in
from tests.support.worlds import JoinedRun

STEPS = 30
COMMAND = (
    *("model=llama_tiny", "model.config.num_hidden_layers=1", "data=synthetic", "data.seq_len=32"),
    *("data.global_batch_size=4", "data.synthetic.num_documents=100", "trainer.accelerator=cpu", "logger=none"),
    *("checkpoint.every_n_steps=5", "trainer.progress=lines", "precision=fp32", "launch.threads_per_worker=1"),
)


def hint(said: str) -> list[str]:
    """The words of the last line that says how to go on, as a shell reads them."""
    lines = re.findall(r"^resume:? +(.*)$", said, re.MULTILINE)
    assert lines, said
    words = shlex.split(lines[-1])
    assert words.pop(0) == "mgpu-pipe"
    return words


def typed(words: list[str], cwd: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    done = run_program(words, cwd, environment(cache), 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def stopped(run: ForkedProgram, number: int = signal.SIGTERM) -> str:
    run.send_signal(number)
    out, err = run.communicate(120)
    assert run.returncode == 75, out + err
    return out


def rates(folder: Path) -> dict[int, float]:
    return column(folder, "lr")


@pytest.mark.slow
def test_the_printed_line_goes_on_in_that_very_run(cache: Path, tmp_path: Path) -> None:
    place = tmp_path / "a place, it's mine"
    place.mkdir()
    words = (*COMMAND, f"trainer.max_steps={STEPS}", "run.root='my runs'", "run.name=one two", "optimizer.lr=2e-4")
    truth = run_folder(mgpu(cache, tmp_path, *words))
    run = launched(cache, place, *words)
    while not (found := list(place.glob("my runs/one two/*"))):
        time.sleep(0.01)
    wait_for_step(found[0], 7, run)
    out = stopped(run)
    assert column(found[0], "train/loss").keys() != set(range(1, STEPS + 1))
    typed([*words, "checkpoint.resume=none", "trainer.max_steps=1"], place, cache)  # now the newest of this name
    done = typed(hint(out), place, cache)
    assert run_folder(done.stdout) == found[0] and "resuming from" in done.stderr
    assert column(found[0], "train/loss") == column(truth, "train/loss") and rates(found[0]) == rates(truth)
    for verb in ("generate", "export"):
        (line,) = re.findall(rf"^{verb} +(mgpu-pipe .*)$", done.stdout, re.MULTILINE)
        typed(shlex.split(line)[1:], place, cache)
    assert (found[0] / "exported" / "config.json").exists()


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_point_by_point_and_alone(cache: Path, tmp_path: Path) -> None:
    words = ("-m", *COMMAND, f"trainer.max_steps={STEPS}", "optimizer.lr=1e-3,2e-4", "checkpoint.resume=auto")
    sweep = launched(cache, tmp_path, *words)
    runs = tmp_path / "outputs" / "run"
    while len(list(runs.glob("*"))) < 2:
        assert sweep.poll() is None, sweep.communicate()
        time.sleep(0.01)
    first, second = sorted(runs.iterdir(), key=lambda folder: folder.stat().st_ctime)
    if not (first / "metrics.csv").exists():
        first, second = second, first
    wait_for_step(second, 7, sweep)
    out = stopped(sweep)
    member, whole = (shlex.split(line)[1:] for line in re.findall(r"^resume:? +(.*)$", out, re.MULTILINE))
    assert whole[:2] == ["sweeps", "resume"]
    before = {folder: dict(rates(folder)) for folder in (first, second)}
    assert max(before[first].values()) == 1e-3 and max(before[second].values()) == 2e-4
    assert len(before[second]) < STEPS
    assert run_folder(typed(member, tmp_path, cache).stdout) == second
    for folder in (first, second):
        assert len(metrics(folder)) == STEPS and max(rates(folder).values()) == max(before[folder].values())
    out = mgpu(cache, tmp_path, *whole)  # the point that was stopped is complete already
    assert set(runs.iterdir()) == {first, second} and out.count(f"run: {runs}") == 1
    (report,) = re.findall(r"^report: (.*sweeps/.*/report.html)$", out, re.MULTILINE)
    assert first.name in (tmp_path / report).read_text(), "it leads to the runs' own reports"
    assert "* lowest held-out loss" in out
    mgpu(cache, tmp_path, *(word.replace(f"steps={STEPS}", f"steps={STEPS + 2}") for word in words))
    assert set(runs.iterdir()) == {first, second}, "max_steps is not mathematics"
    assert [len(metrics(folder)) for folder in (first, second)] == [STEPS + 2] * 2


@pytest.mark.slow
def test_a_signal_after_a_runs_last_step_ends_the_sweep(cache: Path, tmp_path: Path) -> None:
    words = ("-m", *COMMAND, "trainer.max_steps=2", "optimizer.lr=1e-3,2e-4", "checkpoint.resume=auto")
    sweep = launched(cache, tmp_path, *words)
    while not list(tmp_path.glob("outputs/run/*/summary.json")):  # trained, and its report is not written yet
        assert sweep.poll() is None, sweep.communicate()
        time.sleep(0.01)
    sweep.send_signal(signal.SIGTERM)
    out, said = sweep.communicate()
    assert sweep.returncode == 75, said
    assert "1 of 2 runs are left" in said and len(list((tmp_path / "outputs" / "run").iterdir())) == 1
    (line,) = re.findall(r"^resume: (.*)$", out, re.MULTILINE)
    mgpu(cache, tmp_path, *shlex.split(line)[1:])
    assert [len(metrics(folder)) for folder in (tmp_path / "outputs" / "run").iterdir()] == [2, 2]


@pytest.mark.slow
def test_points_that_differ_in_what_is_no_mathematics_find_their_own(cache: Path, tmp_path: Path) -> None:
    words = ("-m", *COMMAND, "trainer.max_steps=2,3", "checkpoint.resume=auto", "checkpoint.every_n_steps=1")
    mgpu(cache, tmp_path, *words)
    runs = sorted((tmp_path / "outputs" / "run").iterdir())
    assert sorted(len(metrics(folder)) for folder in runs) == [2, 3]
    mgpu(cache, tmp_path, *words)
    assert sorted((tmp_path / "outputs" / "run").iterdir()) == runs


@pytest.mark.slow
def test_a_joined_world_finds_its_run_by_its_mathematics_and_says_why_it_starts_another(
    cache: Path, tmp_path: Path
) -> None:
    def train(*more: str) -> str:
        run = JoinedRun(1, tmp_path, cache, tmp_path / f"{len(logs)}.log", *COMMAND, "strategy=ddp", *more)
        logs.append(run)
        assert run.wait() == [0], run.said()
        return run.said()

    logs: list[JoinedRun] = []
    auto = ("checkpoint.resume=auto", "trainer.max_steps=4")
    first = run_folder(train(*auto, "optimizer.lr=1e-3"))
    said = train(*auto, "optimizer.lr=2e-3")
    assert run_folder(said) != first
    assert f"{first.relative_to(tmp_path)}, is another (optimizer.lr=0.001 there, 0.002 here)" in said
    assert run_folder(train("checkpoint.resume=auto", "trainer.max_steps=6", "optimizer.lr=1e-3")) == first
    named = train(f"run.dir={first}", "checkpoint.resume=auto", "trainer.max_steps=8", "optimizer.lr=2e-3")
    assert "resuming with optimizer.lr=0.002 (was 0.001)" in named and run_folder(named) == first
    again = train(*auto, "optimizer.lr=2e-3", "trainer.max_steps=5")
    assert run_folder(again) == run_folder(said), "a run of two learning rates is nobody's own"


@pytest.mark.slow
@pytest.mark.parametrize("named", one_in(2, [False, True]))
def test_a_launch_killed_while_it_prepares_is_gone_on_in_and_a_living_one_is_named(
    named: bool, cache: Path, tmp_path: Path
) -> None:
    where = [f"run.dir={tmp_path / 'run'}"] if named else [f"run.root={tmp_path}"]
    words = [
        *COMMAND,
        *where,
        "data.synthetic.num_documents=30000",
        f"seed={1 + named}",
        "trainer.max_steps=2",
        "checkpoint.resume=auto",
    ]
    first = launched(cache, tmp_path, *words)
    while not (found := [*tmp_path.glob("run/config.yaml"), *tmp_path.glob("run/*/config.yaml")]):
        assert first.poll() is None, first.communicate()
        time.sleep(0.001)
    folder = found[0].parent
    first.send_signal(signal.SIGSTOP)  # however slow this machine is, the second finds it alive and preparing
    second = run_program(words, tmp_path, environment(cache), 120)
    assert not (folder / "data.json").exists()
    assert (second.returncode, second.stdout) == (2, "")
    assert f"another launch is preparing in this folder (process {first.pid} on " in second.stderr
    first.kill()
    assert run_folder(typed(words, tmp_path, cache).stdout) == folder and len(metrics(folder)) == 2
    refused = run_program([*words, "checkpoint.resume=none"], tmp_path, environment(cache), 120)
    if named:  # what trained is not begun anew, and the line that is told goes on
        line = refused.stderr.strip().rpartition("continue it with: ")[2]
        assert refused.returncode == 2, refused.stderr
        assert run_folder(typed(shlex.split(line)[1:], tmp_path, cache).stdout) == folder
    else:
        assert run_folder(refused.stdout) != folder


@pytest.mark.slow
def test_a_launch_stopped_before_training_tells_the_line_that_begins_it(cache: Path, tmp_path: Path) -> None:
    words = [*COMMAND, "data.synthetic.num_documents=30000", "seed=3", "trainer.max_steps=2", "run.root='my runs'"]
    run = launched(cache, tmp_path, *words)
    while not (found := list(tmp_path.glob("my runs/run/*/config.yaml"))):
        time.sleep(0.001)
    out = stopped(run)
    assert run_folder(typed(hint(out), tmp_path, cache).stdout) == found[0].parent
    assert len(metrics(found[0].parent)) == 2
