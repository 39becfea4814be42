"""Compiles DeepSpeed's extensions once before the workers start, in a process without torch."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.hydra.interpolation import hide_environment
from mgpu_pipe.config.paths import RunPaths, cache_folder, private_folder, processor
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError, print_line
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.orphan_guard import OrphanGuard
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.build_extension import FOLDER
from mgpu_pipe.training.deepspeed.deepspeed_config import ENGINE, deepspeed_config


def write_engine_settings(paths: RunPaths, config: RunConfig, processes: int) -> None:
    """Write ``deepspeed.json`` for a DeepSpeed run; texts of the environment stay interpolations."""
    if config.strategy.engine != ENGINE:
        return
    dims = ParallelDims.resolve(config.strategy, processes)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    settings = deepspeed_config(config.strategy, config.precision, config.trainer, plan)
    paths.deepspeed.write_text(json.dumps(hide_environment(settings), indent=2) + "\n", encoding="utf-8")


BUILDER = "mgpu_pipe.training.deepspeed.build_extension"
READY, LOG = "ready", "build.log"
COMPILING = "compiling DeepSpeed's NVMe access, once; this takes some minutes"


def prepare_extensions(strategy: StrategyConfig, trainer: TrainerConfig, cache_dir: str | None) -> None:
    """Compile the extensions that the strategy needs, and set their folder for child processes.

    Concurrent processes wait for one of them. Does nothing if no extension is needed.

    Args:
        cache_dir: ``data.cache_dir``.

    Raises:
        ConfigError: the compilation failed; names the log.
    """
    if strategy.engine != ENGINE or strategy.offload != "nvme":
        return
    device = device_type(trainer)
    folder = extension_folder(cache_dir, device)
    private_folder(cache_folder(cache_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock")):
        if not (folder / READY).exists():
            _build(folder, device)
    os.environ[FOLDER] = str(folder)


def extension_folder(cache_dir: str | None, device: str) -> Path:
    """Folder of extensions for this Python, torch, DeepSpeed and processor, whose every instruction they use."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = f"{python}-torch{version('torch')}-deepspeed{version('deepspeed')}-{device}-{processor()}"
    return cache_folder(cache_dir) / "extensions" / name


def _build(folder: Path, device: str) -> None:
    print_line(COMPILING, file=sys.stderr, flush=True)
    # torch's lock file of a killed build would block this one
    for stale in folder.glob("*/lock"):
        stale.unlink()
    log = folder / LOG
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)}
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    with log.open("w") as out:
        code = _run_whole(python_module(BUILDER), environment, out)
    if code != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "rror" in line]
        why = f" ({lines[-1][:200]})" if lines else ""
        reason = f"DeepSpeed's NVMe access could not be compiled{why}"
        raise ConfigError("strategy.offload", "nvme", f"see {log}, or use strategy.offload=cpu", reason)
    (folder / READY).touch()


def _run_whole(command: list[str], environment: dict[str, str], out: TextIO) -> int:
    """Run the command and return its exit code; its compilers end with this process, too."""
    orphan_guard = OrphanGuard()
    process = subprocess.Popen(
        bind_command(command), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    )
    try:
        orphan_guard.watch(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # while unreaped, its group ID is not reused
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        orphan_guard.dismiss(process.pid)
        code = process.wait()
        orphan_guard.close()
    return code


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
