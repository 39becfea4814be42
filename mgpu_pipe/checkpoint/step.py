"""A committed step, as far as it was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """A committed step: its folder, and what is wrong with it."""

    step: int
    path: Path
    faults: tuple[str, ...] = ()
    """Each names file and, where bytes were read, chunk; empty if the step is whole."""
    saved: float | None = None
    """When its manifest was written, in seconds since the epoch; None where there is none."""
    nbytes: int = 0
    """Bytes on the disk."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Content of state.json, as far as it can be read."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration it was saved under, as written (nothing of the environment), as far as it can be read."""
    other_format: bool = False
    """Another version of this program wrote it."""
    ruined: bool = False
    """No finite step followed it (see ``checkpoint.ruined``)."""

    @property
    def whole(self) -> bool:
        return not self.faults

    def metric(self, name: str) -> float | None:
        metrics = self.state.get("metrics")
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        return float(value) if isinstance(value, (int, float)) else None
