"""The world that torchrun or srun started this process in, as its environment describes it. No torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from mgpu_pipe.errors import ConfigError

LIFELINE_FD = "MGPU_LIFELINE_FD"
"""Set for the workers of a launcher of our own, whose world is not joined but launched."""
WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
SLURM_PORTS = (15000, 20000)
"""First and number of the ports that the numbers of a SLURM job, its step and its restarts are mapped to, where
MASTER_PORT is not given."""


def existing_world(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the world this process was started in; empty if it was not, so that it launches its own.

    Raises:
        ConfigError: one of them is missing or no number that can be.
    """
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
    """Processes of the joined world, and those of them on this node; None where there is none.

    What this process sees of the node's GPUs does not tell: srun may show each task its own alone.

    Raises:
        ConfigError: a variable of the world is missing or no number that can be.
    """
    if LIFELINE_FD in os.environ:
        return None
    if _is_torchs(os.environ):
        return _torch_sizes(os.environ)
    return _slurm_sizes(os.environ) if _is_slurm_step(os.environ) else None


def _is_torchs(environment: Mapping[str, str]) -> bool:
    return all(environment.get(name) for name in WORLD_VARIABLES)


def _torch_sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """Processes of the world, and those of this node."""
    size = _number(environment, "WORLD_SIZE", 1)
    return size, _number(environment, "LOCAL_WORLD_SIZE", 1, size) if "LOCAL_WORLD_SIZE" in environment else size


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task of several; a batch script has SLURM_PROCID, too."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return False
    return _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1


def _slurm_sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """Tasks of the step, and those of this node."""
    size, name = _number(environment, "SLURM_STEP_NUM_TASKS", 1), "SLURM_STEP_TASKS_PER_NODE"
    text = _variable(environment, name)
    try:
        counts = tasks_per_node(text)
    except ValueError:
        raise _refused(name, text, "it is no list of numbers such as 2(x3),1") from None
    return size, counts[_number(environment, "SLURM_NODEID", 0, len(counts) - 1)]


def _variable(environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name, "")
    if not text:
        raise _refused(name, text, "it is not set, though other variables of a world are")
    return text


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    """A variable's value, a number from ``least`` to ``most``."""
    text = _variable(environment, name)
    if not (text.isascii() and text.isdigit() and int(text) >= least and (most is None or int(text) <= most)):
        wanted = f"a number from {least}" + ("" if most is None else f" to {most}")
        raise _refused(name, text, f"it is not {wanted}")
    return int(text)


def _refused(name: str, text: str, reason: str) -> ConfigError:
    own = "SLURM_STEP_NUM_TASKS" if name.startswith("SLURM") else "RANK"
    fix = f"start it by {'srun' if own != 'RANK' else 'torchrun'}, or unset {own} for a run of its own"
    return ConfigError(name, text, fix, reason)


def _slurm_world(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables of an srun task."""
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
    """The first node's name, or, where that is a name of SLURM's only, the address srun was started at."""
    host = hosts(_variable(environment, "SLURM_STEP_NODELIST"))[0]
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return environment.get("SLURM_LAUNCH_NODE_IPADDR", host)
    return host


def hosts(node_list: str) -> list[str]:
    """The names in SLURM's compressed list: ``gpu[03-05,9],login`` gives ``gpu03 gpu04 gpu05 gpu9 login``."""
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        made = [""]
        for text, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            ends = [text] if text else [each for part in numbers.split(",") for each in _counted(part)]
            made = [begun + end for begun in made for end in ends]
        names += made
    return names


def _counted(part: str) -> list[str]:
    """``03-05`` gives ``03 04 05``."""
    first, _, last = part.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def tasks_per_node(text: str) -> list[int]:
    """SLURM's run-length form: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
