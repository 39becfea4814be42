"""Layout of a run's folder, and the folder of cached data and compiled code.

Whoever creates a folder of compiled code can run code as its users. torch's default for Inductor is
``/tmp/torchinductor_<user>``, which any user of the machine can create first. Its default for extensions is a shared
folder if there is no home. So both lie in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.system.local_files import exists, expand_home

COMPARISON = "comparison.html"
"""A report of several runs."""
CACHE_CONTENT = {"fingerprints", "tokenizers", "tokens", "extensions", "configurations", "compiled", "served"}
"""Names of everything in the folder of cached data."""


@dataclass(frozen=True)
class RunPaths:
    """The layout of one run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def overrides(self) -> Path:
        return self.root / "overrides.txt"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def data(self) -> Path:
        """The prepared data (``Prepared`` as JSON), for workers and later readers."""
        return self.root / "data.json"

    @property
    def deepspeed(self) -> Path:
        """Settings passed to DeepSpeed, in runs of that engine."""
        return self.root / "deepspeed.json"

    @property
    def tokenizer(self) -> Path:
        """The run's copy of its tokenizer folder."""
        return self.root / "tokenizer"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def samples(self) -> Path:
        """Continuations of the prompts during training."""
        return self.root / "samples.jsonl"

    @property
    def logger(self) -> Path:
        """The W&B or MLflow runs that the loggers write to."""
        return self.root / "logger.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def attempts(self) -> Path:
        """The history of a run's attempts (:mod:`mgpu_pipe.runs.history`)."""
        return self.root / "attempts.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def profile(self) -> Path:
        """Traces of steps, and GPU memory snapshots of out-of-memory errors."""
        return self.root / "profile"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def rank_metrics(self, rank: int) -> Path:
        """Times and memory of a rank by step, in runs of several ranks."""
        return self.logs / f"rank-{rank}.csv"

    def rank_error(self, rank: int) -> Path:
        """A worker's error, for the launcher; removed at the start of each attempt."""
        return self.logs / f"rank-{rank}.error.json"


def cache_folder(configured: str | None) -> Path:
    """Folder of cached data: the configured one, ``$MGPU_PIPE_CACHE``, or the user's cache folder."""
    chosen = configured or os.environ.get("MGPU_PIPE_CACHE")
    if chosen:
        return expand_home(chosen)
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mgpu_pipe"


def private_folder(folder: Path) -> None:
    """Create the folder of cached data for this user alone, or check that no other user can write into it.

    Raises:
        ConfigError: the folder belongs to another user, or is not empty and others may write into it.
        OSError: the folder cannot be created.
    """
    if not exists(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, "this is a file", str(folder))
    if status.st_uid != os.geteuid():
        reason = "the cache belongs to another user"
        raise ConfigError("data.cache_dir", folder, "give a folder of your own, or set MGPU_PIPE_CACHE to one", reason)
    names = {entry.name for entry in folder.iterdir()} if status.st_mode & 0o077 else set()
    if status.st_mode & 0o022 and not names:
        folder.chmod(0o700)
        names = {entry.name for entry in folder.iterdir()}  # what others put there until then
    if status.st_mode & 0o022 and names:
        reason = "others can write into the cache, and may have put code there"
        raise ConfigError("data.cache_dir", folder, "empty it, or give another folder", reason)
    if status.st_mode & 0o077 and names <= CACHE_CONTENT:
        folder.chmod(0o700)


def working_directory() -> str:
    """Working directory of this program; BadInputError if it was deleted."""
    try:
        return os.getcwd()
    except OSError as error:
        raise BadInputError(f"the working directory is gone ({error.strerror}); cd to a folder that exists") from error


FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",  # DeepSpeed's, too
}
COMPILED = "compiled"
CPU_INFORMATION = Path("/proc/cpuinfo")


def compile_caches(configured: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Create the folders and return the variables that name them; a folder in ``environment`` is only checked.

    Args:
        configured: ``data.cache_dir``.

    Raises:
        ConfigError: a folder belongs to another user, or others can write into it or create it.
        OSError: a folder cannot be created.
    """
    cache, variables = cache_folder(configured).absolute(), {}
    for name, folder in FOLDERS.items():
        if name in environment:
            _refuse_shared(name, Path(environment[name]))
            continue
        private_folder(cache)
        path = cache / COMPILED / processor() / folder
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        variables[name] = str(path)
    return variables


def _refuse_shared(name: str, folder: Path) -> None:
    """Refuse a folder that others can write into, or a missing folder that others can create."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    status = nearest.stat()
    there = nearest == folder.absolute()
    if (there and status.st_uid != os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "another user of this machine can put code there" if there else "another user can make this folder"
        raise ConfigError(name, folder, "give a folder of your own (chmod 700), or leave the variable out", reason)


def processor() -> str:
    """Name of the processor type: compiled code uses all its instructions, and nodes of a cluster share a home."""
    return f"{platform.machine()}-{_instructions()}"


def _instructions() -> str:
    """A short digest of the instruction sets that the processor has."""
    try:
        lines = CPU_INFORMATION.read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:8]
