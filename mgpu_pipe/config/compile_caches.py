"""Folders of compiled code, below the user's cache. Whoever creates such a folder can run code as its users.

torch's default for Inductor is ``/tmp/torchinductor_<user>``, which any user of the machine can create first. Its
default for extensions is a shared folder if there is no home.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Mapping
from pathlib import Path

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.errors import ConfigError

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
