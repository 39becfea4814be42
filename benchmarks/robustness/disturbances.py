"""Runs and exports under random SIGKILL, SIGTERM, SIGHUP and SIGSTOP: none lost, none different, nothing left.

One command line is repeated until it ends with 0, then the export of its run. Each attempt meets one disturbance: a
signal to the launcher, to one of its processes or to all of them, at a random instant from the start on. A SIGSTOP is
followed by SIGCONT or SIGKILL. Oracles, after every attempt: no process of it is left; the newest checkpoint is not
older than before and equals the undisturbed run's of that step in every tensor's hash; the command line is never
refused. At the end: metrics.csv and the exported weights equal the undisturbed run's in every bit, and no ``.partial``
and no temporary folder is there. That no process of ours maps a file of ``/dev/shm`` is looked at before each signal.

    python -m benchmarks.robustness.disturbances --count 200
    python -m benchmarks.robustness.disturbances --count 110 --objectives

The second line disturbs runs of every objective and of LoRA, as many times each. Launcher and workers are forked from a
server that imported everything (``--real 0.1``: a tenth of the attempts are the program itself, imports and all).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import finish
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.checkpoint.selection import newest_valid
from tests.support.command import REPOSITORY
from tests.support.objectives import OBJECTIVES, list_overrides
from tests.support.program import ForkedProgram

STEPS, WORLD_SIZE = 16, 2
SHORT = (
    "strategy=ddp",
    f"trainer.devices={WORLD_SIZE}",
    "data.global_batch_size=8",
    "data.micro_batch_size=2",
    "optimizer.lr=3e-4",
    "trainer.accelerator=cpu",
    "precision=fp32",
    "logger=none",
    f"trainer.max_steps={STEPS}",
    "trainer.val_every_n_steps=5",
    "checkpoint.every_n_steps=2",
    "checkpoint.resume=auto",
    "launch.threads_per_worker=1",
    "launch.collective_timeout=60",
    "trainer.deterministic=true",
)
COMMAND = (
    *SHORT,
    "model=llama_tiny",
    "model.config.num_hidden_layers=2",
    "data=synthetic",
    "data.seq_len=32",
    "data.synthetic.num_documents=100",
)
COLUMNS = ("step", "train/loss", "train/grad_norm", "lr", "val/loss")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP)
TARGETS = ("launcher", "process", "all")
DISTURBED_AT_MOST = 6
"""Attempts of one run that are disturbed; then it may end."""
PATIENCE_S = 600.0
GONE_WITHIN_S = 30.0


class Disturbed(AssertionError):
    """Something was lost, differed, or was left."""


@dataclass
class Truth:
    """The undisturbed run: its rows, the hash of every tensor file of every step, and its export's weights."""

    rows: list[tuple[str, ...]]
    steps: dict[int, dict[str, Any]]
    exported: str


@dataclass
class Tally:
    """Disturbances by phase and signal, and what became of the attempts."""

    by_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    runs: int = 0


class Program:
    """One attempt: forked, or the program itself."""

    def __init__(self, words: list[str], place: Path, cache: Path, real: bool) -> None:
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
        environment = {
            **kept,
            "MGPU_PIPE_CACHE": str(cache),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(place / "tmp"),
        }
        (place / "tmp").mkdir(exist_ok=True)
        self._forked: ForkedProgram | None = None
        if real:
            self._log = (place / "said").open("w+")
            self._real = subprocess.Popen(
                [sys.executable, "-m", "mgpu_pipe", *words],
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
            self.pid = self._real.pid
        else:
            self._forked = ForkedProgram(words, place, environment)
            self.pid = self._forked.pid

    def code(self) -> int | None:
        return self._real.poll() if self._forked is None else self._forked.poll()

    def wait(self) -> tuple[int, str]:
        """Exit code, and what was said."""
        if self._forked is not None:
            out, err = self._forked.communicate(PATIENCE_S)
            code = self._forked.returncode
            assert code is not None
            return code, out + err
        code = self._real.wait(PATIENCE_S)
        self._log.seek(0)
        return code, self._log.read()


def started_at(pid: int) -> str:
    """Tells a process from a later one of its number; empty for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def family(pid: int) -> dict[int, str]:
    """The process and all that descend from it, with when each was started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = {}, [pid]
    while waiting:
        one = waiting.pop()
        found[one] = started_at(one)
        waiting += children.get(one, [])
    return {one: began for one, began in found.items() if began}


def _status(pid: int) -> str:
    """State and command, for a report."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return f"{stat[0]} of {stat[1]} {Path(f'/proc/{pid}/cmdline').read_bytes()[-80:]!r}"
    except OSError:
        return "gone"


def named_memory(pids: dict[int, str]) -> list[str]:
    """Files of /dev/shm that the processes map: those that a SIGKILL would leave there."""
    found = []
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found += [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]
    return found


def rows(folder: Path) -> list[tuple[str, ...]]:
    file = folder / "metrics.csv"
    if not file.exists():
        return []
    with file.open(newline="") as text:
        return [tuple(row.get(name) or "" for name in COLUMNS) for row in csv.DictReader(text)]


def content(step: Path) -> dict[str, Any]:
    """What a checkpoint holds, wherever it lies: hashes of its tensors, and its state."""
    state = json.loads((step / "state.json").read_text())
    state.pop("config_hash")  # the folder's name is in the configuration
    files = {name: record.sha256 for name, record in read_manifest(step).files.items() if name.endswith(".safetensors")}
    return {**files, "state": state}


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def phase_of(folder: Path, cache: Path, verb: str, rows_before: int, children: int) -> str:
    """What the attempt is at, as far as it shows: in its files, and in how many processes it has."""
    if verb == "export":
        return verb
    if not children:
        return "first moments"
    if not list(cache.rglob("manifest.json")):
        return "preparation"
    if list(folder.glob("checkpoints/*.partial")):
        return "saving"
    return "training" if len(rows(folder)) > rows_before else "start or end"


class Disturbances:
    """See the module.

    Args:
        place: an empty folder for everything.
        real: share of attempts that are the program itself.
        command: overrides of the run.
    """

    def __init__(self, place: Path, seed: int, real: float, command: tuple[str, ...] = COMMAND) -> None:
        self._place, self._chance, self._real, self._command = place, random.Random(seed), real, command
        self.tally = Tally()
        self._warm = place / "cache"
        self._truth = self._undisturbed()

    def _undisturbed(self) -> Truth:
        folder = self._place / "undisturbed" / "run"
        folder.parent.mkdir()
        out = folder.with_name("exported")
        for words in (
            [*self._command, f"run.dir={folder}", "checkpoint.keep_last=0"],
            ["export", str(folder), "--out", str(out)],
        ):
            code, said = Program(words, folder.parent, self._warm, real=False).wait()
            if code:
                raise Disturbed(f"the undisturbed run ended with {code}: {said[-2000:]}")
        steps = {int(path.name[5:]): content(path) for path in (folder / "checkpoints").iterdir()}
        return Truth(rows(folder), steps, weights(out))

    def go(self, count: int) -> None:
        """Disturb ``count`` attempts."""
        while sum(self.tally.by_phase.values()) < count:
            place = self._place / f"run-{self.tally.runs}"
            place.mkdir()
            fresh = self.tally.runs % 3 == 0  # with data to prepare
            workers = ["data.num_workers=1"] if self.tally.runs % 4 == 1 else []
            self._one_run(place, place / "cache" if fresh else self._warm, workers, count)
            self.tally.runs += 1
            done = sum(self.tally.by_phase.values())
            print(f"{done} disturbances, {self.tally.runs} runs", file=sys.stderr, flush=True)

    def _one_run(self, place: Path, cache: Path, more: list[str], count: int) -> None:
        folder, out = place / "run", place / "exported"
        newest = 0
        for verb, words in (
            ("train", [*self._command, *more, f"run.dir={folder}"]),
            ("export", ["export", str(folder), "--out", str(out), "--force"]),
        ):
            most = DISTURBED_AT_MOST if verb == "train" else 1
            for attempt in range(100):
                disturbed = attempt < most and sum(self.tally.by_phase.values()) < count
                code, said = self._attempt(words, place, folder, cache, verb, disturbed)
                newest = self._saved(folder, newest)
                if code == 0:
                    break
                if not disturbed or code == 2:
                    raise Disturbed(f"{verb} ended with {code} {'' if disturbed else 'undisturbed'}: {said[-3000:]}")
        self._whole(place, folder, out)

    def _attempt(
        self, words: list[str], place: Path, folder: Path, cache: Path, verb: str, disturbed: bool
    ) -> tuple[int, str]:
        program = Program(words, place, cache, real=self._chance.random() < self._real)
        members: dict[int, str] = {}
        what = "nothing"
        if disturbed:
            before = len(rows(folder))
            self._wait(program, folder, verb)
            members = family(program.pid)
            if mapped := named_memory(members):
                raise Disturbed(f"named shared memory: {mapped[:2]}")
            number, target = self._chance.choice(SIGNALS), self._chance.choice(TARGETS)
            phase = phase_of(folder, cache, verb, before, len(members) - 1)
            what = f"{number.name} to {target} in {phase}"
            self.tally.by_phase[phase, number.name] += 1
            self._send(program.pid, members, number, target)
        try:
            code, said = program.wait()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            states = [f"{pid} {_status(pid)}" for pid in family(program.pid) | members]
            raise Disturbed(f"hangs after {what}: {states}") from error
        self.tally.ends[code] += 1
        deadline = time.monotonic() + GONE_WITHIN_S
        while left := [pid for pid, began in members.items() if started_at(pid) == began]:
            if time.monotonic() > deadline:
                commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
                raise Disturbed(f"left after {what}: {commands}")
            time.sleep(0.02)
        return code, f"after {what}: {said}"

    def _wait(self, program: Program, folder: Path, verb: str) -> None:
        """Until a random instant: of the first moments, of the start, or of training and its saves."""
        kind = self._chance.random()
        if verb == "export":
            time.sleep(self._chance.uniform(0.0, 8.0))
        elif kind < 0.2:
            time.sleep(self._chance.uniform(0.0, 0.3))
        elif kind < 0.35 or not folder.exists():
            while program.code() is None and not list((folder / "logs").glob("rank-*.log")):
                time.sleep(0.001)
            time.sleep(self._chance.uniform(0.0, 0.5))
        elif kind < 0.5:
            time.sleep(self._chance.uniform(0.0, 3.0))
        else:
            file, before = folder / "metrics.csv", len(rows(folder))
            deadline = time.monotonic() + PATIENCE_S
            while program.code() is None and len(rows(folder)) in (0, before) and time.monotonic() < deadline:
                if not file.exists():
                    before = 0
                time.sleep(0.005)
            time.sleep(self._chance.uniform(0.0, 1.0))

    def _send(self, launcher: int, members: dict[int, str], number: signal.Signals, target: str) -> None:
        others = [pid for pid in members if pid != launcher]
        chosen = [launcher]
        if target == "process" and others:
            chosen = [self._chance.choice(others)]
        elif target == "all":
            chosen = [launcher, *others]
        _signal(chosen, members, number)
        if number == signal.SIGSTOP:
            time.sleep(self._chance.uniform(0.1, 0.6))
            _signal(chosen, members, self._chance.choice((signal.SIGCONT, signal.SIGKILL)))

    def _saved(self, folder: Path, newest: int) -> int:
        """The newest step; fails where it is an older one, or differs."""
        found = newest_valid(folder / "checkpoints", "stop", "full") if folder.exists() else None
        step = found.step if found is not None else 0
        if step < newest:
            raise Disturbed(f"step {newest} was saved, and now step {step} is the newest")
        if found is not None and step in self._truth.steps and content(found.path) != self._truth.steps[step]:
            raise Disturbed(f"the checkpoint of step {step} differs")
        if found is not None and rows(folder)[:step] != self._truth.rows[:step]:
            raise Disturbed(f"rows up to step {step} differ")
        return step

    def _whole(self, place: Path, folder: Path, out: Path) -> None:
        if rows(folder) != self._truth.rows:
            raise Disturbed(f"metrics.csv of {folder} differs")
        if weights(out) != self._truth.exported:
            raise Disturbed(f"the weights of {out} differ")
        # torchinductor_<user> is torch's own cache, made by the process that imports inductor first.
        temporary = [path for path in (place / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
        left = [*place.rglob("*.partial"), *temporary]
        if left:
            raise Disturbed(f"left behind: {left}")


def _signal(pids: list[int], members: dict[int, str], number: signal.Signals) -> None:
    for pid in pids:
        if pid in members and started_at(pid) == members[pid]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def list_objectives(place: Path) -> dict[str, tuple[str, ...]]:
    """Overrides of a short run of every objective and of LoRA; trains their base model below ``place``."""
    base, model = place / "base", place / "model"
    text = ("model=llama_tiny", "data=synthetic", "data.seq_len=64")
    for words in ([*SHORT, *text, f"run.dir={base}"], ["export", str(base), "--out", str(model)]):
        code, said = Program(words, place, place / "cache", real=False).wait()
        if code:
            raise Disturbed(f"the base model's run ended with {code}: {said[-2000:]}")
    return {
        **{name: (*SHORT, *list_overrides(name, place)) for name in OBJECTIVES},
        "distill": (*SHORT, *text, "objective=distill", f"objective.teacher={model}", "objective.teacher_weight=0.7"),
        "lora": (*SHORT, *text, "model=hf", f"model.path={model}", "peft=lora", "peft.r=4", "optimizer.lr=3e-3"),
    }


def disturb_objectives(place: Path, seed: int, real: float, count: int) -> Tally:
    """Disturb ``count`` attempts, the same number for each objective."""
    commands = list_objectives(place)
    total = Tally()
    for number, (name, command) in enumerate(commands.items()):
        folder = place / name
        folder.mkdir()
        disturbances = Disturbances(folder, seed + number, real, command)
        share = count // len(commands) + (number < count % len(commands))
        try:
            disturbances.go(share)
        except Disturbed as error:
            raise Disturbed(f"{name}: {error}") from error
        print(f"{name}: {share} disturbances", file=sys.stderr, flush=True)
        total.by_phase += disturbances.tally.by_phase
        total.ends += disturbances.tally.ends
        total.runs += disturbances.tally.runs
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=float, default=0.1, help="share of attempts that are not forked")
    parser.add_argument("--objectives", action="store_true", help="disturb runs of every objective")
    arguments = parser.parse_args()
    began = time.monotonic()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the programs would rightly ignore it
    with tempfile.TemporaryDirectory() as place:
        if arguments.objectives:
            tally = disturb_objectives(Path(place), arguments.seed, arguments.real, arguments.count)
        else:
            disturbances = Disturbances(Path(place), arguments.seed, arguments.real)
            disturbances.go(arguments.count)
            tally = disturbances.tally
    phases = sorted({phase for phase, _ in tally.by_phase})
    table = [[phase, *(tally.by_phase[phase, number.name] for number in SIGNALS)] for phase in phases]
    ends = ", ".join(f"{code}: {times}" for code, times in sorted(tally.ends.items()))
    out = finish(
        "disturbances_objectives" if arguments.objectives else "disturbances",
        f"{arguments.count} disturbances over {tally.runs} runs and exports: none lost, none different",
        ["phase", *(number.name for number in SIGNALS)],
        table,
        f"seed {arguments.seed}, {arguments.real:g} of the attempts not forked; exit codes of all attempts: {ends}; "
        f"no process, named semaphore, .partial or temporary folder was left; {time.monotonic() - began:.0f} s",
    )
    print(f"written to {out}")


if __name__ == "__main__":
    main()
