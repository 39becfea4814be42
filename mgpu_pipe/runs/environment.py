"""``environment.json``: hardware, software and command of a run, found without importing the packages it names."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import mgpu_pipe
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.system.hardware import WAITING_VARIABLES, Threads, cpu_cores, cpu_name
from mgpu_pipe.system.local_files import replace_file

PACKAGES = (
    "torch",
    "pytorch-lightning",
    "transformers",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "numpy",
    "deepspeed",
    "peft",
    "torchao",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "liger-kernel",
    "rich",
    "tensorboard",
)
VARIABLES = ("CUDA_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "PYTORCH_", "OMP_", "MKL_", "CUBLAS_")
"""Prefixes of the recorded environment variables."""
COMMAND_TIMEOUT_S = 10.0
GIB = 2**30


def describe_environment(
    command: Sequence[str],
    threads: Threads,
    world_size: int,
    local_options: Sequence[str] = (),
    worker_variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, object]:
    """Describe the environment without secrets: of its variables, only those of devices, communication and threads.

    Args:
        local_options: options from ``./conf`` of the working directory.
        worker_variables: variables that workers get on top of this process's.
    """
    return {
        "started": time.time(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": list(command),
        "folder": os.getcwd(),
        "own_conf": list(local_options),
        "mgpu_pipe": mgpu_pipe.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "host": socket.gethostname(),
        "cpu": {"model": cpu_name(), "cores": os.cpu_count(), "usable_cores": cpu_cores()},
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 2),
        "gpus": _gpus(),
        "git": _git(),
        "workers": world_size,
        "threads_per_worker": threads.per_worker,
        "threads_rule": threads.rule,
        "variables": {k: v for k, v in {**os.environ, **worker_variables}.items() if k.startswith(VARIABLES)},
        "threads_wait": {name: os.environ[name] for name in WAITING_VARIABLES if name in os.environ},
    }


def write_environment(path: Path, environment: dict[str, object], *, flush: bool = True) -> None:
    """Write the file atomically: a launch killed here must not lose the run's start."""
    replace_file(path, json.dumps(environment, indent=2) + "\n", flush=flush)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _gpus() -> list[str]:
    if not os.path.exists("/proc/driver/nvidia"):  # avoids starting nvidia-smi without a GPU
        return []
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def _git() -> dict[str, object]:
    """Commit of the working directory, and whether tracked files differ from it."""
    commit = _output("git", "rev-parse", "HEAD")
    if not commit:
        return {}
    status = ("status", "--porcelain", "--untracked-files=no")
    changed = _output(
        "git", "-c", "core.fsmonitor=false", *status
    )  # fsmonitor could run a program of the folder's choice
    return {"commit": commit, "dirty": bool(changed)}


def _output(*command: str) -> str:
    """Output of a program; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            bind_command(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
