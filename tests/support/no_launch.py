"""A launcher that starts no processes, in the place of the program's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.launch import outcome


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
    local.launch = launch
    monkeypatch.setitem(sys.modules, local.__name__, local)
    monkeypatch.setattr(outcome, "show_sweep", show_sweep)
