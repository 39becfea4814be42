"""Whether torch.compile can build kernels for GPUs here."""

from __future__ import annotations

import functools
import os
import shutil
from importlib.machinery import PathFinder

COMPILERS = ("gcc", "cc", "clang")
"""The C compilers that Triton looks for, besides ``CC``."""


@functools.cache
def gpu_kernels_compile() -> bool:
    """Whether Triton is installed, and a C compiler, which it starts."""
    wanted = os.environ.get("CC")
    found = any(map(shutil.which, [wanted] if wanted else COMPILERS))
    return found and PathFinder.find_spec("triton") is not None
