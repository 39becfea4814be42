"""The keys of ``sweep.*``: how ``-m`` chooses its points, and which of their runs is the best."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class SweepConfig:
    name: str | None = None
    """Name of a sweep (-m), whose folder is <run.root>/sweeps/<name>; null names it after date and time."""
    metric: str | list[str] = "auto"
    """What a sweep's points are ranked by; auto is the objective's headline where data is held out, else train/loss.
    Of two metrics, [a,b], no point is the best: those that no other beats in both are shown."""
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    """Which end of sweep.metric is the better; auto knows an accuracy from a loss."""
    points: str | None = None
    """A csv file whose header names keys and whose rows are the points; with values in the command line, each row for
    each combination of them."""
    seeds: int = 1
    """Runs of every point, with seed, seed + 1, ...; the best point is chosen by their mean, with its noise."""
    diverged_above: float | None = None
    """A training loss above this at a run's end counts as diverged."""
    search: Literal["grid", "random", "tpe", "gp", "nsga2"] = "grid"
    """grid takes every combination of values; the others draw sweep.trials points from ranges and lists: at random, or
    by Optuna's samplers (mgpu_pipe[sweeps]): TPE, Gaussian process, or NSGA-II for two metrics."""
    trials: int = 20
    """Points that a search draws."""
    space: dict[str, Any] = field(default_factory=dict)
    """What a search draws from, by key: interval(1e-5,1e-3), tag(log,interval(1e-5,1e-3)), a list of values, or
    {low, high, log, values, when: {key: value}}; values and ranges in the command line are added to it."""
    pruner: Literal["none", "asha", "median"] = "none"
    """Train to sweep.rungs first: asha lets a third of the runs at a rung go on, median the better half."""
    rungs: list[int] = field(default_factory=list)
    """Steps at which sweep.pruner decides; empty: a ninth and a third of trainer.max_steps."""
    parallel: int = 1
    """Points at once on this machine, which share its cores and GPUs evenly."""
