"""A launcher that starts no processes, in the place of the program's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Result:
    """What a launch ended with."""

    status: str
    exit_code: int
    folder: Path
    asked_to_stop: bool = False


def launches_by(
    monkeypatch: pytest.MonkeyPatch,
    launch: Callable[..., Result],
    show_sweep: Callable[..., object] = lambda runs, write, again: None,
) -> None:
    """Have runs launched by ``launch``, and a sweep's end shown by ``show_sweep``."""
    local: Any = types.ModuleType("mgpu_pipe.launch.local")
    end: Any = types.ModuleType("mgpu_pipe.launch.sweep_end")
    local.launch, end.show_sweep = launch, show_sweep
    for module in (local, end):
        monkeypatch.setitem(sys.modules, module.__name__, module)
