"""What is looked at on a node before a job trains there; a node that fails is left out when the job is queued again."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path

from mgpu_pipe.config.hardware import usable_gpus
from mgpu_pipe.config.resolve import device_type, devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import RunFolderError

BAD_NODES = "bad_nodes.txt"
"""In the run's folder: a line for each node that failed, its name first. The batch script reads it."""
LEAST_FREE = 64 << 20
"""Bytes that a node's temporary folder and the run's folder need."""
CLOCK_S = 60.0
"""By how much a node's clock may differ from that of the file system."""
MEMORY_SHARE = 0.5
"""Of the memory that the job was given, what must be free when it starts."""


def node_faults(config: RunConfig, folder: Path, node: str) -> list[str]:
    """What is wrong with this node, in words: GPUs, memory, disks, clock; empty for a good one.

    Raises:
        RunFolderError: the run's own folder is full, which is no node's fault.
    """
    faults = []
    wanted = devices_per_node(config) if device_type(config) == "cuda" and not _has_own_gpu() else 0
    if usable_gpus() < wanted:
        faults.append(f"{usable_gpus()} of {wanted} GPUs can be used")
    given = os.environ.get("SLURM_MEM_PER_NODE", "")
    if given.isdigit() and int(given) and _available() < MEMORY_SHARE * (int(given) << 20):
        faults.append(f"{_available() >> 20} MiB of memory are free, {given} were asked for")
    for place in (Path(os.environ.get("TMPDIR", tempfile.gettempdir())), folder):
        try:
            written = _write(place, node)
            if abs(written - time.time()) > CLOCK_S and place == folder:
                faults.append(f"its clock is off by {time.time() - written:.0f} s")
            space = os.statvfs(place)
            full = space.f_bavail * space.f_frsize < LEAST_FREE
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full:
                faults.append(f"{place} cannot be written ({error.strerror})")
        if full and place == folder:  # on every node
            raise RunFolderError(f"{folder}: has less than {LEAST_FREE >> 20} MiB free; make room, and queue it again")
        if full:
            faults.append(f"{place} has less than {LEAST_FREE >> 20} MiB free")
    return faults


def leave_out(folder: Path, node: str, faults: list[str]) -> None:
    """Tell the batch script to queue the job again without ``node``."""
    with (folder / BAD_NODES).open("a", encoding="utf-8") as file:
        file.write(f"{node} {'; '.join(faults)}\n")


def _has_own_gpu() -> bool:
    """Whether srun shows this task its own GPU alone."""
    return "SLURM_STEP_GPUS" not in os.environ and "SLURM_GPUS_PER_TASK" in os.environ


def _write(folder: Path, node: str) -> float:
    """Write a file and remove it; when the file system says that this was."""
    path = folder / f".{node}-{os.getpid()}.check"
    try:
        path.write_text(node, encoding="utf-8")
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def _available() -> int:
    """Bytes of memory that are free or can be freed."""
    with open("/proc/meminfo", encoding="ascii") as file:
        values = {name: value for name, _, value in (line.partition(":") for line in file)}
    return int(values["MemAvailable"].split()[0]) << 10
