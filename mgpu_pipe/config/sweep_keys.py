"""The keys of ``sweep.*``: how ``-m`` chooses its points, and which of their runs is the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class SweepConfig:
    name: str | None = None
    """Name of a sweep (-m), whose folder is <run.root>/sweeps/<name>; null names it after date and time."""
    metric: str = "auto"
    """What a sweep's points are ranked by; auto is the objective's headline where data is held out, else train/loss."""
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    """Which end of sweep.metric is the better; auto knows an accuracy from a loss."""
    points: str | None = None
    """A csv file whose header names keys and whose rows are the points; with values in the command line, each row for
    each combination of them."""
    seeds: int = 1
    """Runs of every point, with seed, seed + 1, ...; the best point is chosen by their mean, with its noise."""
    diverged_above: float | None = None
    """A training loss above this at a run's end counts as diverged."""
