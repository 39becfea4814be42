"""Joined world: the world in which torchrun or srun started this process, from its environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from mgpu_pipe.errors import ConfigError

LIFELINE_FD = "MGPU_LIFELINE_FD"
"""Variable of workers of this project's launcher, whose world is launched, not joined."""
WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
SLURM_PORTS = (15000, 20000)
"""First port and number of ports, to which a SLURM job's ID, step and restarts are mapped if MASTER_PORT is not set."""


def existing_world(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the joined world, empty without one; ConfigError for a missing or wrong number."""
    if LIFELINE_FD in environment:
        return {}
    if _is_torchs(environment):
        size, here = _torch_sizes(environment)
        _number(environment, "RANK", 0, size - 1)
        _number(environment, "MASTER_PORT", 1, 65535)
        if "LOCAL_RANK" in environment:
            _number(environment, "LOCAL_RANK", 0, here - 1)
        return {name: environment[name] for name in WORLD_VARIABLES}
    return _slurm_world(environment) if _is_slurm_step(environment) else {}


def joined_processes() -> tuple[int, int] | None:
    """Numbers of processes in the joined world and on this node; None without a joined world.

    The visible GPUs do not show them: srun may show each task only its GPU.

    Raises:
        ConfigError: a variable of the world is missing or not a valid number.
    """
    if LIFELINE_FD in os.environ:
        return None
    if _is_torchs(os.environ):
        return _torch_sizes(os.environ)
    return _slurm_sizes(os.environ) if _is_slurm_step(os.environ) else None


def _is_torchs(environment: Mapping[str, str]) -> bool:
    return all(environment.get(name) for name in WORLD_VARIABLES)


def _torch_sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """Numbers of processes in the world and on this node."""
    size = _number(environment, "WORLD_SIZE", 1)
    return size, _number(environment, "LOCAL_WORLD_SIZE", 1, size) if "LOCAL_WORLD_SIZE" in environment else size


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks; a batch script has SLURM_PROCID, too."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return False
    return _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1


def _slurm_sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """Numbers of tasks in the step and on this node."""
    size, name = _number(environment, "SLURM_STEP_NUM_TASKS", 1), "SLURM_STEP_TASKS_PER_NODE"
    text = _variable(environment, name)
    try:
        counts = tasks_per_node(text)
    except ValueError:
        raise _refusal(name, text, "it is no list of numbers such as 2(x3),1") from None
    return size, counts[_number(environment, "SLURM_NODEID", 0, len(counts) - 1)]


def _variable(environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name, "")
    if not text:
        raise _refusal(name, text, "it is not set, though other variables of a world are")
    return text


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    """Value of a variable, a number from ``least`` to ``most``."""
    text = _variable(environment, name)
    if not (text.isascii() and text.isdigit() and int(text) >= least and (most is None or int(text) <= most)):
        wanted = f"a number from {least}" + ("" if most is None else f" to {most}")
        raise _refusal(name, text, f"it is not {wanted}")
    return int(text)


def _refusal(name: str, text: str, reason: str) -> ConfigError:
    variable = "SLURM_STEP_NUM_TASKS" if name.startswith("SLURM") else "RANK"
    fix = f"start it by {'srun' if variable != 'RANK' else 'torchrun'}, or unset {variable} to start a new world"
    return ConfigError(name, text, fix, reason)


def _slurm_world(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for an srun task."""
    first_port, ports = SLURM_PORTS
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, restart = (_number({name: "0", **environment}, name, 0) for name in names)
    size, local_size = _slurm_sizes(environment)
    return {
        "RANK": str(_number(environment, "SLURM_PROCID", 0, size - 1)),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID", 0, local_size - 1)),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _master_address(environment),
        "MASTER_PORT": str(
            _number(environment, "MASTER_PORT", 1, 65535)
            if environment.get("MASTER_PORT")
            else first_port + (job * 31 + step + restart * 7) % ports
        ),
    }


def _master_address(environment: Mapping[str, str]) -> str:
    """Name of the first node, or the address of srun if that name is known only to SLURM."""
    host = hosts(_variable(environment, "SLURM_STEP_NODELIST"))[0]
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return environment.get("SLURM_LAUNCH_NODE_IPADDR", host)
    return host


def hosts(node_list: str) -> list[str]:
    """Names of SLURM's compressed list: ``gpu[03-05,9],login`` gives ``gpu03 gpu04 gpu05 gpu9 login``."""
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        prefixes = [""]
        for text, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            ends = [text] if text else [number for part in numbers.split(",") for number in _number_range(part)]
            prefixes = [prefix + end for prefix in prefixes for end in ends]
        names += prefixes
    return names


def _number_range(part: str) -> list[str]:
    """Numbers of a range: ``03-05`` gives ``03 04 05``."""
    first, _, last = part.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def tasks_per_node(text: str) -> list[int]:
    """Counts from SLURM's run-length form: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
