"""Usable cores. Oracles: the kernel's affinity mask, and control group files as the kernel writes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_pipe.system import hardware


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
