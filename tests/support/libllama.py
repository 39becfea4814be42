"""llama.cpp's own library, out of an npm package: downloaded, or the test goes without it."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.support.command import REPOSITORY

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
TIMEOUT_S = 300


@functools.lru_cache(maxsize=1)
def libllama() -> Path | None:
    """The folder of ``libllama``; None where npm is missing or cannot download it."""
    out = REPOSITORY / ".pytest_cache" / "libllama"
    inside = out / "package" / "bins" / "linux-x64"
    if inside.is_dir():
        return inside
    npm = shutil.which("npm")
    if npm is None:
        return None
    partial = out.with_name("libllama.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        subprocess.run([npm, "pack", PACKAGE], cwd=partial, check=True, capture_output=True, timeout=TIMEOUT_S)
    except (subprocess.SubprocessError, OSError):
        return None
    [archive] = partial.glob("*.tgz")
    with tarfile.open(archive) as files:
        files.extractall(partial, filter="data")
    archive.unlink()
    partial.rename(out)
    return inside
