"""Sweeps of small runs on a real SLURM cluster under random disturbances: every run finishes, none differs.

A sweep is one array of jobs. At random instants a random member of it is killed, loses its node's daemon with all its
processes, has its node drained, gets a signal, is queued again or preempted. Oracle: the same sweep undisturbed, run by
this machine; metrics must be equal bit for bit. In the end no process of the cluster's jobs is left.

    python -m benchmarks.robustness.slurm_disturbances --count 50
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.support import finish
from mgpu_pipe.sweep.store import Store
from tests.support.command import column, mgpu
from tests.support.slurm_cluster import TINY, Cluster, end_cluster, start_cluster
from tests.support.slurm_disturbances import Disturb, drain, kill_node, kill_tasks, preempt, requeue, revive, warn

METRICS = ("train/loss", "train/grad_norm", "val/loss")
SEEDS = 6
WORDS = [
    *(word for word in TINY if word != "launch=slurm"),
    "trainer.max_steps=30",
    "trainer.devices=1",
    "checkpoint.every_n_steps=3",
]
ON_SLURM = [
    "hydra/launcher=slurm",
    "launch.max_restarts_without_progress=100",
    "callbacks.slow._target_=tests.support.slow.Slow",
    "callbacks.slow.seconds=0.2",
]
KINDS: dict[str, Disturb] = {
    "kill a step": kill_tasks,
    "kill a daemon": kill_node,
    "drain a node": drain,
    "signal": warn,
    "requeue": requeue,
    "preempt": preempt,
}
PATIENCE_S = 900.0


class Disturbances:
    """See the module.

    Args:
        place: an empty folder for everything.
        cluster: which programs find by SLURM_CONF.
        seeds: runs of the sweep.
    """

    def __init__(self, place: Path, cluster: Cluster, seed: int, seeds: int = SEEDS) -> None:
        self._place, self._cluster, self._chance = place, cluster, random.Random(seed)
        self._seeds = f"seed={','.join(map(str, range(1, seeds + 1)))}"
        self._cache = place / "cache"
        self.made: Counter[str] = Counter()
        self.attempts = self.runs = 0
        here = place / "undisturbed"
        here.mkdir()
        mgpu(self._cache, here, "-m", *WORDS, self._seeds, "sweep.name=swept", timeout=PATIENCE_S)
        self._truth = [self._columns(folder) for _, folder in self._points(here)]

    def go(self, count: int, kinds: list[str] | None = None) -> None:
        """Make ``count`` disturbances, of these kinds one after another or at random."""
        for number in range(count):
            there = self._place / f"sweep-{number}"
            there.mkdir()
            array = mgpu(self._cache, there, "-m", *WORDS, *ON_SLURM, self._seeds, "sweep.name=swept")
            job = array.splitlines()[-2].removeprefix("job: ")
            self._disturb(there, job, count, kinds)
            self._whole(there)
            if sum(self.made.values()) >= count:
                break
        self._cluster.until(self._cluster.nothing_left, "the end of all processes")

    def _disturb(self, there: Path, array: str, count: int, kinds: list[str] | None) -> None:
        """Until the sweep has finished; the last disturbances are made whatever is left of it."""
        deadline = time.monotonic() + PATIENCE_S
        last = time.monotonic()
        while any(status != "finished" for status, _ in self._points(there)):
            if time.monotonic() > deadline:
                raise AssertionError(self._cluster.ask("squeue", "--array") + str(self._points(there)))
            listed = self._cluster.ask("squeue", "--array", "--noheader", "--format=%i %T").splitlines()
            queued = [line.split() for line in listed if line.startswith(f"{array}_")]
            if not queued and any(status != "finished" for status, _ in self._points(there)):
                raise AssertionError(f"SLURM has given up a run: {self._points(there)}")
            running = [job for job, state in queued if state == "RUNNING"]
            done = sum(self.made.values())
            if time.monotonic() - last > 30:
                revive(self._cluster)
            if done >= count or not running:
                time.sleep(1)
                continue
            time.sleep(self._chance.uniform(0, 6))
            kind = kinds[done] if kinds else self._chance.choice(list(KINDS))
            try:
                KINDS[kind](self._cluster, self._chance.choice(running))
            except (AssertionError, IndexError) as error:  # the job has ended meanwhile, or is being queued again
                print(f"not made: {kind}: {str(error)[-150:]}", file=sys.stderr, flush=True)
                continue
            self.made[kind] += 1
            last = time.monotonic()
            print(f"{done + 1} of {count}: {kind}", file=sys.stderr, flush=True)
            if self._chance.random() < 0.5:
                time.sleep(self._chance.uniform(0, 12))
                revive(self._cluster)
        revive(self._cluster)

    def _points(self, cwd: Path) -> list[tuple[str, Path]]:
        """Status and folder of a sweep's runs."""
        points = Store(cwd / "outputs" / "sweeps" / "swept").points()
        return [(point.status, Path(point.folder)) for point in points]

    def _columns(self, folder: Path) -> dict[str, dict[int, float]]:
        return {name: column(folder, name) for name in METRICS}

    def _whole(self, there: Path) -> None:
        for (_, folder), truth in zip(self._points(there), self._truth, strict=True):
            if self._columns(folder) != truth:
                raise AssertionError(f"{folder}: differs from the undisturbed run")
            summary = json.loads((folder / "summary.json").read_text())
            if summary["status"] != "finished":
                raise AssertionError(f"{folder}: {summary['status']}")
            self.attempts += len(summary["attempts"])
            self.runs += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slurm-disturbed-") as name:
        place = Path(name)
        place.chmod(0o755)  # munged wants folders that all may enter
        cluster = start_cluster(place / "cluster")
        try:
            os.environ.update(cluster.variables)
            disturbances = Disturbances(place, cluster, arguments.seed)
            disturbances.go(arguments.count)
        finally:
            end_cluster(place / "cluster")
    count = sum(disturbances.made.values())
    finish(
        "slurm_disturbances",
        f"{count} disturbances of sweeps on a SLURM cluster of three nodes: every run finished, none differs",
        ["disturbance", "times"],
        [[kind, disturbances.made[kind]] for kind in KINDS],
        f"{disturbances.runs} runs took {disturbances.attempts} attempts; {', '.join(METRICS)} are equal bit for bit "
        f"to those of the undisturbed sweep; no process was left; seed {arguments.seed}; "
        f"{time.monotonic() - began:.0f} s on a machine shared with other work",
    )


if __name__ == "__main__":
    main()
