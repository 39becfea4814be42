"""The world that torchrun or srun started this process in, as its environment describes it. No torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

LIFELINE_FD = "MGPU_LIFELINE_FD"
"""Set for the workers of a launcher of our own, whose world is not joined but launched."""
WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
SLURM_PORTS = (15000, 20000)
"""First and number of the ports that a SLURM step's number is mapped to, where MASTER_PORT is not given."""


def existing_world(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the world this process was started in; empty if it was not, so that it launches its own."""
    if LIFELINE_FD in environment:
        return {}
    if all(name in environment for name in WORLD_VARIABLES):
        return {name: environment[name] for name in WORLD_VARIABLES}
    return _slurm_world(environment) if _is_slurm_step(environment) else {}


def joined_processes() -> tuple[int, int] | None:
    """Processes of the joined world, and those of them on this node; None where there is none.

    What this process sees of the node's GPUs does not tell: srun may show each task its own alone.
    """
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        return None
    if LIFELINE_FD in os.environ:
        return None
    if all(name in os.environ for name in WORLD_VARIABLES):
        size = int(os.environ["WORLD_SIZE"])
        return size, int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return _slurm_sizes(os.environ) if _is_slurm_step(os.environ) else None


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task of several; a batch script has SLURM_PROCID, too."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environment


def _slurm_sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """Tasks of the step, and those of this node."""
    here = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    return int(environment["SLURM_STEP_NUM_TASKS"]), here


def _slurm_world(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables of an srun task."""
    first_port, ports = SLURM_PORTS
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    size, local_size = _slurm_sizes(environment)
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _master_address(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(first_port + (job * 31 + step) % ports),
    }


def _master_address(environment: Mapping[str, str]) -> str:
    """The first node's name, or, where that is a name of SLURM's only, the address srun was started at."""
    host = first_host(environment["SLURM_STEP_NODELIST"])
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return environment.get("SLURM_LAUNCH_NODE_IPADDR", host)
    return host


def first_host(node_list: str) -> str:
    """The first name of SLURM's compressed list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    head, bracket, rest = node_list.partition("[")
    if not bracket or "," in head:
        return node_list.partition(",")[0]
    return head + re.split(r"[-,\]]", rest)[0]


def tasks_per_node(text: str) -> list[int]:
    """SLURM's run-length form: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
    found: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found
