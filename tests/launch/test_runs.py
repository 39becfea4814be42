"""Whole runs, launched as a user does, killed, stopped, resumed and joined.

The oracle is the uninterrupted run: the same losses and gradient norms, bit for bit, no row missing or double.
"""

from __future__ import annotations

import csv
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.launching import ROOT, alive, until
from tests.support.command import workers_of
from tests.support.program import ForkedProgram

pytestmark = pytest.mark.slow

STEPS = 24
COMMON = (
    "strategy=ddp",
    "model=llama_tiny",
    "data=synthetic",
    "data.seq_len=64",
    "data.global_batch_size=8",
    "data.synthetic.num_documents=200",
    "optimizer.lr=3e-4",
    "trainer.accelerator=cpu",
    "logger=none",
    "checkpoint.every_n_steps=4",
    f"trainer.max_steps={STEPS}",
    "launch.threads_per_worker=1",
)
PROGRAM = (sys.executable, "-m", "mgpu_pipe")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def environment_at(place: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "MGPU_PIPE_CACHE": str(place / "cache")}


def start(place: Path, *overrides: str, program: Sequence[str] = PROGRAM, devices: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, *COMMON, f"trainer.devices={devices}", f"run.root={place / 'outputs'}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env=environment_at(place),
    )


def start_forked(place: Path, *overrides: str, devices: int = 1) -> ForkedProgram:
    """The same without waiting for imports."""
    words = [*COMMON, f"trainer.devices={devices}", f"run.root={place / 'outputs'}", *overrides]
    return ForkedProgram(words, place, environment_at(place))


def run_to_end(process: subprocess.Popen[str] | ForkedProgram, code: int = 0) -> tuple[Path, str]:
    """The folder that the last line of stdout names, and stderr."""
    out, err = process.communicate(timeout=180)
    assert process.returncode == code, err
    last = out.rstrip().splitlines()[-1]
    assert last.startswith("run: "), out
    return Path(last.removeprefix("run: ")), err


def rows(folder: Path) -> list[tuple[str, str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in csv.DictReader(file)]


def summary_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())


def wait_for_step(folder: Path, step: int) -> None:
    def reached() -> bool:
        file = folder / "metrics.csv"
        return file.exists() and f"\n{step}," in file.read_text()

    until(reached, f"step {step}", 120)


@pytest.fixture(scope="module")
def reference(place: Path) -> list[tuple[str, str, str]]:
    folder, _ = run_to_end(start_forked(place, "run.name=reference", devices=2))
    found = rows(folder)
    assert [int(step) for step, _, _ in found] == list(range(1, STEPS + 1))
    return found


def test_a_run_leaves_a_complete_folder(place: Path, reference: list[tuple[str, str, str]]) -> None:
    (folder,) = (place / "outputs" / "reference").iterdir()
    for name in (
        *("config.yaml", "overrides.txt", "environment.json", "metrics.csv", "summary.json", "report.html"),
        *("tokenizer/tokenizer.json", "logs/rank-0.log", "logs/rank-1.log", "config-attempt-1.yaml"),
    ):
        assert (folder / name).stat().st_size, name
    summary, environment = summary_of(folder), json.loads((folder / "environment.json").read_text())
    assert "OMP_NUM_THREADS" in environment["variables"], "what the workers were given"
    assert (summary["status"], summary["step"], summary["world_size"]) == ("finished", STEPS, 2)
    assert environment["threads_per_worker"] == 1
    assert environment["packages"]["torch"]


@pytest.mark.exhaustive
def test_killed_at_any_moment_it_resumes_as_if_nothing_had_happened(
    place: Path, reference: list[tuple[str, str, str]]
) -> None:
    folder = place / "killed"
    launcher = start(place, f"run.dir={folder}")
    wait_for_step(folder, 10)
    pids = [int(pid) for pid in _children(launcher.pid)]
    launcher.kill()
    launcher.communicate(timeout=60)
    assert len(pids) >= 2
    until(lambda: not any(map(alive, pids)), "the end of all workers")
    resumed = start(place, f"run.dir={folder}", "checkpoint.resume=auto")
    wait_for_step(folder, 15)
    resumed.send_signal(signal.SIGTERM)
    _, said = run_to_end(resumed, code=75)
    assert "resuming from" in said
    stopped = summary_of(folder)
    assert stopped["status"] == "stopped"
    assert (folder / str(stopped["checkpoint"]) / "manifest.json").exists()
    run_to_end(start(place, f"run.dir={folder}", "checkpoint.resume=auto"))
    assert rows(folder) == reference
    assert summary_of(folder)["attempts"] == 3
    written = (folder / "summary.json").read_bytes()
    run_to_end(start(place, f"run.dir={folder}", "checkpoint.resume=auto"))  # complete: nothing is done
    assert (folder / "summary.json").read_bytes() == written


def test_a_run_whose_worker_was_killed_says_the_line_that_goes_on(place: Path) -> None:
    folder = place / "crashed"
    launcher = start_forked(place, f"run.dir={folder}", "trainer.max_steps=100000")
    saved = folder / "checkpoints"  # written beside training; a run that has none says no line
    until(lambda: any(not path.suffix for path in saved.glob("step-*")), "a checkpoint", 120)
    (worker,) = workers_of(launcher)
    os.kill(worker, signal.SIGKILL)
    said, _ = launcher.communicate(timeout=60)
    (line,) = (line.removeprefix("resume: ") for line in said.splitlines() if line.startswith("resume: "))
    assert launcher.returncode == 1
    assert line.startswith("mgpu-pipe ")
    again = ForkedProgram([*shlex.split(line)[1:], "trainer.max_steps=12"], place, environment_at(place))
    assert run_to_end(again)[0] == folder


def test_what_may_not_differ_is_refused_and_the_earlier_run_left_as_it_was(
    place: Path, reference: list[tuple[str, str, str]]
) -> None:
    (folder,) = (place / "outputs" / "reference").iterdir()
    kept = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.csv", "summary.json")}
    more = (f"run.dir={folder}", "checkpoint.resume=auto", "trainer.max_steps=30")
    other = start_forked(place, *more, "seed=7", "data.global_batch_size=16")
    _, said = other.communicate(timeout=120)
    assert other.returncode == 2, said
    assert "seed=7" in said
    assert "data.global_batch_size=16" in said
    assert "Traceback" not in said
    assert {name: (folder / name).read_bytes() for name in kept} == kept


def test_a_folder_in_use_is_refused_with_its_holder(place: Path) -> None:
    folder = place / "busy"
    holder = start_forked(place, f"run.dir={folder}", "trainer.max_steps=100000")
    wait_for_step(folder, 2)
    second = start_forked(place, f"run.dir={folder}", "checkpoint.resume=auto")
    _, said = second.communicate(timeout=120)
    holder.kill()
    assert second.returncode == 2
    assert f"another launch is training in this folder (process {holder.pid} on " in said


def test_torchruns_world_is_joined_with_the_same_losses(place: Path, reference: list[tuple[str, str, str]]) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "mgpu_pipe")
    folder, _ = run_to_end(start(place, "run.name=joined", program=torchrun))
    assert list((place / "outputs" / "joined").iterdir()) == [folder]
    assert rows(folder) == reference
    assert summary_of(folder)["world_size"] == 2
    assert "step" in (folder / "logs" / "rank-0.log").read_text()


@pytest.mark.exhaustive
def test_a_stopped_run_of_torchrun_ends_well_and_says_so(place: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "-m", "mgpu_pipe")
    folder = place / "stopped"
    agent = start(place, f"run.dir={folder}", "trainer.max_steps=100000", program=torchrun, devices=1)
    wait_for_step(folder, 5)
    (worker,) = _children(agent.pid)
    os.kill(int(worker), signal.SIGTERM)
    run_to_end(agent)
    assert summary_of(folder)["status"] == "stopped"


def test_a_terminal_shows_a_bar_and_stops_the_run_after_saving_when_it_is_closed(place: Path) -> None:
    """The kernel sends SIGHUP to the session, and whatever is printed afterwards fails. The log stays plain."""
    ours, theirs = pty.openpty()
    folder = place / "closed"
    shell = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            shell,
            *PROGRAM,
            *COMMON,
            "trainer.devices=1",
            f"run.dir={folder}",
            "trainer.max_steps=100000",
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=place,
        env={**environment_at(place), "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(theirs)
    shown = bytearray()
    reader = threading.Thread(target=_read_all, args=(ours, shown), daemon=True)
    reader.start()
    wait_for_step(folder, 3)
    until(lambda: b"/100000" in shown, "a bar", 120)
    process.send_signal(signal.SIGSTOP)  # so that the terminal is gone before anything is printed
    os.close(ours)
    process.send_signal(signal.SIGCONT)
    assert process.wait(120) == 75
    summary = summary_of(folder)
    assert summary["status"] == "stopped" and (folder / str(summary["checkpoint"]) / "manifest.json").exists()
    assert (folder / "report.html").exists()
    assert b"\x1b[" in shown and b"\x1b" not in (folder / "logs" / "rank-0.log").read_bytes()


def _read_all(fd: int, shown: bytearray) -> None:
    with suppress(OSError):
        while read := os.read(fd, 65536):
            shown += read


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
