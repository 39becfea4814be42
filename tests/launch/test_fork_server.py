"""A sweep's workers, forked from a process that imported everything. Oracle: the same runs, each started by itself."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from mgpu_pipe.launch.fork_server import NAME
from mgpu_pipe.sweep.store import Store, find
from tests.support.command import column, launched, mgpu, mgpu_anew, run_folder, wait_for_step, workers_of
from tests.sweep.support import TINY, until

OWN = '''
"""Writes what a worker begins with."""
import faulthandler, gc, json, logging, os, random, resource, signal, sys, threading, warnings
import torch, torchmetrics.utilities.prints
import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only

DIFFERS = ("MASTER_PORT", "MGPU_LAUNCHER_PID", "MGPU_LIFELINE_FD", "MGPU_ERROR_FD", "MGPU_STORE_FD", "MGPU_LIVE_FD",
           "MGPU_INHERITED_FDS", "MGPU_PIPE_SWEEP_WORKER")


class State(pl.Callback):
    def setup(self, trainer, module, stage):
        own = torch.random.get_rng_state()
        found = {
            "variables": {k: v for k, v in sorted(os.environ.items()) if k not in DIFFERS},
            "started as": sys.orig_argv, "argv": sys.argv[:-1], "cwd": os.getcwd(), "path": sys.path,
            "umask": os.umask(0o22), "flags": str(sys.flags),
            "handlers": [str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
            "threads": sorted(t.name for t in threading.enumerate()), "torch threads": torch.get_num_threads(),
            "interop": torch.get_num_interop_threads(),
            "random": own.sum().item(), "seed": torch.initial_seed(),
            "deterministic": torch.are_deterministic_algorithms_enabled(), "type": str(torch.get_default_dtype()),
            "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
            "priority": [os.nice(0), sorted(os.sched_getaffinity(0))],
            "collections": [gc.isenabled(), gc.get_threshold()], "faults": faulthandler.is_enabled(),
            "ranks": [rank_zero_only.rank, torchmetrics.utilities.prints.rank_zero_only.rank],
            "group": [torch.distributed.get_rank(), torch.distributed.get_world_size()],
            "loggers": {n: [str(h).split(" ")[0] for h in logging.getLogger(n).handlers] + [logging.getLogger(n).level]
                        for n in sorted(logging.root.manager.loggerDict)},
            "handlers of all": len(logging.root.handlers), "warnings": len(warnings.filters),
            "descriptors": sorted({k(os.readlink(f"/proc/self/fd/{n}")) for n in os.listdir("/proc/self/fd")
                                   if os.path.lexists(f"/proc/self/fd/{n}")}),
            "parent's signal": int(open("/proc/self/status").read().split("SigIgn:")[1].split()[0], 16),
            "modules": sorted(set(sys.modules) - {"mgpu_pipe.launch.fork_server", "mgpu_pipe.launch.worker"}),
        }
        with open(f"{sys.argv[-1]}/state-{os.environ['RANK']}.json", "w") as file:
            json.dump(found, file, default=str)


def k(name):
    return name.split(":")[0] if ":" in name else os.path.basename(name)
'''
WORDS = (*TINY, "trainer.max_steps=3", "strategy=ddp", "trainer.devices=2", "checkpoint.every_n_steps=1")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_worker_that_was_forked_begins_with_what_a_fresh_one_has(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "own_state.py").write_text(OWN)
    words = (*WORDS, "callbacks.mine._target_=own_state.State", "run.name=p")
    fresh = run_folder(mgpu_anew(cache, tmp_path, *words, "seed=2", "run.root=fresh"))
    mgpu_anew(cache, tmp_path, "-m", *words, "seed=1,2", "run.root=forked", "sweep.name=mine")
    second = sorted((tmp_path / "forked" / "p").iterdir())[1]
    for rank in (0, 1):
        theirs, ours = (json.loads((folder / f"state-{rank}.json").read_text()) for folder in (fresh, second))
        assert "mgpu_pipe.launch.worker" in theirs.pop("started as")
        assert "mgpu_pipe.launch.fork_server" in ours.pop("started as")
        for what in theirs:
            assert ours[what] == theirs[what], what


@pytest.mark.slow
def test_a_sweeps_runs_are_bit_for_bit_those_of_fresh_workers(cache: Path, tmp_path: Path) -> None:
    seeds = (1, 2)
    fresh = [run_folder(mgpu(cache, tmp_path, *WORDS, f"seed={seed}", "run.root=fresh")) for seed in seeds]
    mgpu(cache, tmp_path, "-m", *WORDS, f"seed={','.join(map(str, seeds))}", "run.root=forked", "sweep.name=mine")
    for point, theirs in zip(find(tmp_path / "forked", "mine").points(), fresh, strict=True):
        mine = Path(point.folder)
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            assert column(mine, name) == column(theirs, name)
        saved = [folder / "checkpoints" / "step-00000003" for folder in (mine, theirs)]
        files = sorted(path.name for path in saved[1].glob("*.safetensors"))
        assert len(files) > 1
        for name in files:
            assert (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes(), name


@pytest.mark.slow
def test_another_environment_gets_another_server_and_none_outlives_the_sweep(cache: Path, tmp_path: Path) -> None:
    words = (*TINY, "launch.threads_per_worker=1,2", "trainer.max_steps=100000", "checkpoint=none")
    program = launched(cache, tmp_path, "-m", *words, "sweep.name=mine")
    store = tmp_path / "outputs" / "sweeps" / "mine"
    seen = []

    def begun(number: int) -> bool:
        return (store / "sweep.json").exists() and Store(store).points()[number].folder != ""

    for number in (0, 1):
        until(partial(begun, number))
        wait_for_step(Path(Store(store).points()[number].folder), 1, program)
        (server,) = (pid for pid in children(program.pid) if name_of(pid) == NAME)
        (worker,) = workers_of(program)
        assert os.getsid(worker) == worker and os.getsid(server) == server
        seen += [server, worker]
        if number == 0:
            os.kill(server, signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)  # the sweep goes on with the next point
    program.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in seen))
    assert len(set(seen)) == 4


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
