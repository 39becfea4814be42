"""What a cluster does to jobs: preempts, requeues, warns and kills them, and loses nodes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tests.support.slurm_cluster import Cluster

NODES = ("n0", "n1", "n2")
Disturb = Callable[[Cluster, str], None]


def preempt(cluster: Cluster, job: str) -> None:
    """By a job of the partition high that wants all nodes for a moment."""
    script = ["--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.ask("sbatch", *script)


def requeue(cluster: Cluster, job: str) -> None:
    cluster.ask("scontrol", "requeue", job)


def warn(cluster: Cluster, job: str) -> None:
    """What SLURM sends before the time limit."""
    cluster.ask("scancel", "--signal=USR1", job)


def drain(cluster: Cluster, job: str) -> None:
    """The job is queued again, and its last node takes no job until :func:`revive`."""
    cluster.ask("scontrol", "update", f"NodeName={last_node(cluster, job)}", "State=DRAIN", "Reason=a test")
    requeue(cluster, job)


def kill_node(cluster: Cluster, job: str) -> None:
    """The last node's daemons and all its processes die, and come back later."""
    node = last_node(cluster, job)
    kill(daemons_of(cluster, node))  # first: they would tell of the others' end, as no dead node does
    kill(processes_of(cluster, node))


def kill_tasks(cluster: Cluster, job: str) -> None:
    """Every process that srun started for the job on its last node dies; the job's shell lives."""
    raw = cluster.ask("squeue", "--noheader", f"--jobs={job}", "--format=%A").strip()
    kill(processes_of(cluster, last_node(cluster, job), f"SLURM_JOB_ID={raw}", "SLURM_STEP_ID=0"))


def last_node(cluster: Cluster, job: str) -> str:
    nodes = cluster.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    return cluster.ask("scontrol", "show", "hostnames", nodes).split()[-1]


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def daemons_of(cluster: Cluster, node: str) -> list[int]:
    """The node's slurmd and what it started to watch over jobs: all that write its log."""
    log, found = str(cluster.conf.parent / f"slurmd-{node}.log"), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            slurms = (entry / "comm").read_text().startswith("slurm")
            if slurms and any(os.readlink(each) == log for each in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found


def processes_of(cluster: Cluster, node: str, *having: str) -> list[int]:
    """Processes of the cluster's jobs on a node with these variables."""
    wanted, found = {f"SLURM_CONF={cluster.conf}", f"SLURMD_NODENAME={node}", *having}, []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((entry / "environ").read_text(errors="replace").split("\0")):
                found.append(int(entry.name))
    return found


def revive(cluster: Cluster) -> None:
    """Start the daemons that are gone, and let every node take jobs again."""
    for node in NODES:
        subprocess.run(["slurmd", "-N", node], env={**os.environ, **cluster.variables}, capture_output=True)
        state = cluster.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%T")
        if "drain" in state:
            cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
