"""What compiling during a run needs of this machine: a C++ compiler and Python's headers. No torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from mgpu_pipe.errors import ConfigError


def compiler(names: Sequence[str] = ("c++",)) -> str | None:
    """The first of ``names`` that is there; ``CXX`` in their place where it is set."""
    wanted = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [wanted] if wanted else names)), None)


def has_python_headers() -> bool:
    """Whether ``Python.h`` is where this Python's builds look for it; distributions keep it in a package of its own."""
    paths = sysconfig.get_paths()
    return any((Path(paths[name]) / "Python.h").is_file() for name in ("include", "platinclude"))


def missing_compiler(key: str, value: object, who: str) -> Iterator[ConfigError]:
    """What to say where there is no compiler.

    Args:
        who: who compiles what, as a clause.
    """
    wanted = os.environ.get("CXX")
    there = f"CXX={wanted} is not there" if wanted else "there is no C++ compiler"
    fix = "install one (Debian and Ubuntu: apt-get install g++), or set CXX"
    yield ConfigError(key, value, fix, f"{who}, and {there}")


def missing_headers(key: str, value: object, who: str) -> Iterator[ConfigError]:
    """What to say where Python's headers are missing; nothing where they are here."""
    if not has_python_headers():
        fix = "install them (Debian and Ubuntu: apt-get install python3-dev; Fedora: python3-devel)"
        yield ConfigError(key, value, fix, f"{who}, and Python's headers (Python.h) are not here")
