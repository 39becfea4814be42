"""Compiles what DeepSpeed would compile in its workers, once, before they start. No torch in this process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from mgpu_pipe.child import bound
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.launch.orphan_guard import OrphanGuard
from mgpu_pipe.strategies.build_extension import FOLDER
from mgpu_pipe.strategies.deepspeed_config import ENGINE

BUILDER = ("-m", "mgpu_pipe.strategies.build_extension")
READY, LOG = "ready", "build.log"
CPU_INFORMATION = Path("/proc/cpuinfo")
TOLD = "compiling DeepSpeed's NVMe access, once; this takes some minutes"


def prepare_extensions(config: RunConfig) -> None:
    """Have the extensions of this configuration compiled, and tell this process's children where they are.

    Processes that come here together wait for one of them. Does nothing where nothing is to be compiled.

    Raises:
        ConfigError: the compilation failed; the log is named.
    """
    strategy = config.strategy
    if strategy.engine != ENGINE or strategy.offload != "nvme":
        return
    folder = extension_folder(config)
    private_folder(cache_folder(config.data.cache_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not (folder / READY).exists():
            _build(folder, device_type(config))
    os.environ[FOLDER] = str(folder)


def extension_folder(config: RunConfig) -> Path:
    """Where extensions of this Python, torch, DeepSpeed and kind of processor are kept.

    The compiler is told to use every instruction of the processor, and a cluster's nodes share a home folder.
    """
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    processor = f"{platform.machine()}-{_instructions()}"
    name = f"{python}-torch{version('torch')}-deepspeed{version('deepspeed')}-{device_type(config)}-{processor}"
    return cache_folder(config.data.cache_dir) / "extensions" / name


def _instructions() -> str:
    """A short digest of the instruction sets that the processor has."""
    try:
        lines = CPU_INFORMATION.read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:8]


def _build(folder: Path, device: str) -> None:
    print(TOLD, file=sys.stderr, flush=True)
    # torch's own lock file outlives a build that was killed, and would be waited for.
    for stale in folder.glob("*/lock"):
        stale.unlink()
    log = folder / LOG
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)}
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    with log.open("w") as out:
        code = _run_whole([sys.executable, *BUILDER], environment, out)
    if code != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "rror" in line]
        why = f" ({lines[-1][:200]})" if lines else ""
        reason = f"DeepSpeed's NVMe access could not be compiled{why}"
        raise ConfigError("strategy.offload", "nvme", f"see {log}, or use strategy.offload=cpu", reason)
    (folder / READY).touch()


def _run_whole(command: list[str], environment: dict[str, str], out: TextIO) -> int:
    """The command's exit code. Its compilers, which are its children, end with this process, too."""
    orphan_guard = OrphanGuard()
    process = subprocess.Popen(
        bound(command), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    )
    try:
        orphan_guard.watch(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # unreaped, its group cannot be another's
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        orphan_guard.dismiss(process.pid)
        code = process.wait()
        orphan_guard.close()
    return code


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
