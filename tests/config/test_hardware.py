"""Usable cores. Oracles: the kernel's affinity mask, and control group files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mgpu_pipe.config import hardware


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        pytest.param("0::/job", {"cgroup.procs": "1"}, None, id="v2, root without a limit"),
        pytest.param("0::/job", {"job/cpu.max": "max 100000"}, None, id="v2, max"),
        pytest.param("0::/job", {"job/cpu.max": "150000 100000"}, 1.5, id="v2"),
        pytest.param(
            "0::/a/b/c",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "400000 100000"},
            2.0,
            id="v2, the parent's is smaller",
        ),
        pytest.param("0::/../../elsewhere", {"cpu.max": "300000 100000"}, 3.0, id="v2, in a container"),
        pytest.param(
            "4:cpu,cpuacct:/docker/x\n0::/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2.5,
            id="v1, in a container",
        ),
        pytest.param(
            "7:memory:/job\n4:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"},
            0.5,
            id="v1",
        ),
        pytest.param(
            "4:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"},
            None,
            id="v1, no limit",
        ),
    ],
)
def test_the_cores_that_control_groups_leave(
    membership: str, files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(membership + "\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    assert hardware._cpu_quota(groups, own) == cores


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), (0.5, 1), (1.9, 1), (3.0, 3), (64.0, 4)])
def test_the_smaller_of_mask_and_quota(quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(hardware, "_cpu_quota", lambda: quota)
    assert hardware.cpu_cores() == usable
