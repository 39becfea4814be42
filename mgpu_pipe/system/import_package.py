"""Imports packages that only some runs need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mgpu_pipe.errors import ConfigError


def import_package(module: str, package: str, extra: str, key: str, value: str, otherwise: str = "") -> Any:
    """Imports ``module``.

    Args:
        package: its name in the error.
        extra: the optional dependencies of this program that install it.
        key, value: the configuration that needs it.
        otherwise: other ways out, appended to the fix.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: without the library that it brings
        fix = f"install it: pip install 'mgpu_pipe[{extra}]'{otherwise}"
        raise ConfigError(key, value, fix, f"{package} is not installed") from error
