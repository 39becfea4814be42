"""Usable cores and memory, and the threads of a worker: as many as the cores allow, none waiting by spinning.

Oracles: the kernel's affinity mask, control group files as the kernel writes them, and for the waits what torch's
OpenMP itself says it took.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.system import hardware
from mgpu_pipe.system.hardware import Threads, choose_threads, limit_threads
from tests.support.command import REPOSITORY


@pytest.mark.parametrize(
    ("look", "membership", "files", "limit"),
    [
        pytest.param(hardware._cpu_quota, "0::/job", {"cgroup.procs": "1"}, None, id="v2, root without a limit"),
        pytest.param(hardware._cpu_quota, "0::/job", {"job/cpu.max": "max 100000"}, None, id="v2, max"),
        pytest.param(hardware._cpu_quota, "0::/job", {"job/cpu.max": "150000 100000"}, 1.5, id="v2"),
        pytest.param(
            hardware._cpu_quota,
            "0::/a/b/c",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "400000 100000"},
            2.0,
            id="v2, the parent's is smaller",
        ),
        pytest.param(
            hardware._cpu_quota, "0::/../../elsewhere", {"cpu.max": "300000 100000"}, 3.0, id="v2, in a container"
        ),
        pytest.param(
            hardware._cpu_quota,
            "4:cpu,cpuacct:/docker/x\n0::/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2.5,
            id="v1, in a container",
        ),
        pytest.param(
            hardware._cpu_quota,
            "7:memory:/job\n4:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"},
            0.5,
            id="v1",
        ),
        pytest.param(
            hardware._cpu_quota,
            "4:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"},
            None,
            id="v1, no limit",
        ),
        pytest.param(hardware.host_memory, "0::/job", {"job/memory.max": "max"}, None, id="v2, max"),
        pytest.param(hardware.host_memory, "0::/job", {"job/memory.max": "5000"}, 5000, id="v2"),
        pytest.param(
            hardware.host_memory,
            "0::/a/b/c",
            {"a/memory.max": "7000", "a/b/memory.max": "max", "a/b/c/memory.max": "9000"},
            7000,
            id="v2, an ancestor's is smaller",
        ),
        pytest.param(
            hardware.host_memory, "0::/../../elsewhere", {"memory.max": "3000"}, 3000, id="v2, in a container"
        ),
        pytest.param(
            hardware.host_memory,
            "7:memory:/slurm/job/step\n4:cpu:/x",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/slurm/job/memory.limit_in_bytes": "4000",
                "memory/slurm/job/step/memory.limit_in_bytes": "9223372036854771712",
            },
            4000,
            id="v1, the job's and not the step's",
        ),
        pytest.param(
            hardware.host_memory,
            "7:memory:/docker/x\n0::/",
            {"memory/memory.limit_in_bytes": "6000"},
            6000,
            id="v1, container",
        ),
        pytest.param(
            hardware.host_memory,
            "4:cpu:/job",
            {"memory/job/memory.limit_in_bytes": "1"},
            None,
            id="v1, another controller",
        ),
    ],
)
def test_what_control_groups_leave(
    look: Callable[[Path, Path], float | None],
    membership: str,
    files: dict[str, str],
    limit: float | None,
    tmp_path: Path,
) -> None:
    """Cores, and bytes of memory; without a limit the latter are the machine's."""
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(membership + "\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert look(groups, own) == (machine if limit is None and look is hardware.host_memory else limit)


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), (0.5, 1), (1.9, 1), (3.0, 3), (64.0, 4)])
def test_the_smaller_of_mask_and_quota(quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(hardware, "_cpu_quota", lambda: quota)
    assert hardware.cpu_cores() == usable


@pytest.mark.parametrize(
    ("cores", "workers", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 16, 1), (1, 1, 1)]
)
def test_usable_cores_are_shared_out(cores: int, workers: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_cores", lambda: cores)
    config, _ = compose([])
    found = choose_threads(config.launch.threads_per_worker, workers)
    assert found.per_worker == expected
    assert f"{cores} / {workers}" in found.rule


def test_a_given_number_stands_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = compose(["launch.threads_per_worker=3"])
    found = choose_threads(config.launch.threads_per_worker, 4)
    assert found == Threads(3, "launch.threads_per_worker")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    recorded = json.loads(json.dumps(describe_environment(["mgpu-pipe"], found, 4)))
    assert recorded["threads_per_worker"] == 3
    assert recorded["threads_rule"] == "launch.threads_per_worker"
    assert recorded["threads_wait"] == {"GOMP_SPINCOUNT": "7"}


def test_what_the_user_set_stands() -> None:
    for own in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}):
        environment = {**own, "OMP_NUM_THREADS": "3"}
        limit_threads(environment)
        assert environment == {**own, "OMP_NUM_THREADS": "3"}


SHOW = """
from mgpu_pipe.cli import main as cli
cli.main, cli.exit_now = lambda: 0, lambda code: None
cli.program()
import torch
"""


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "300000"}])
def test_the_library_takes_it(own: dict[str, str]) -> None:
    """In the program's process, where torch is imported later than its first line."""
    kept = {name: value for name, value in os.environ.items() if name not in hardware.WAITING_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**kept, **own, "OMP_DISPLAY_ENV": "verbose"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    shown = dict(re.findall(r"(?:\[host\] )?(\w+) ?= ?'(.*)'", done.stderr))
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("needs a torch that was built with libgomp; this one has another OpenMP")
    assert shown["GOMP_SPINCOUNT"] == own.get("GOMP_SPINCOUNT", str(hardware.SPIN_COUNT))
