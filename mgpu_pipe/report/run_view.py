"""A run's folder as the tables and the report see it: everything that can be read, nothing demanded.

A run that failed, that still trains, or whose folder was copied without some files has a report too, so each file
may be missing or broken; what is broken is named in :attr:`RunView.problems`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.step import Step
from mgpu_pipe.config.dotted import leaves, setting
from mgpu_pipe.config.objective import Description, description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    NotPlainError,
    parse_json,
    parse_yaml,
    read_bytes,
)
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.report import redact
from mgpu_pipe.runs.lock import is_held
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.runs.newest import find_runs, is_run_folder
from mgpu_pipe.runs.samples_file import read_samples

MOST_RANKS = 1 << 20
WARM_UP_ROWS = 2
"""Rows left out of the median throughput: the first steps compile and fill caches."""


@dataclass
class RunView:
    """What a run's folder holds."""

    paths: RunPaths
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    samples: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """What the model made of the prompts at which steps, the last ones at the end."""
    checkpoints: list[Step] = field(default_factory=list)
    error: str = ""
    failed_rank: int | None = None
    running: bool = False
    """A launch holds the folder."""
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.of_config("run", "name") or self.paths.root.parent.name)

    @property
    def folder_name(self) -> str:
        return self.paths.root.name

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, ``running``, or ``unfinished``: it was killed."""
        if self.summary.get("status"):
            return str(self.summary["status"])
        return "running" if self.running else "failed" if self.error else "unfinished"

    @property
    def steps(self) -> int:
        steps = self.metrics.get("step") or [0]
        recorded = self.summary.get("step")
        return recorded if isinstance(recorded, int) else int(max(steps))

    @property
    def total_steps(self) -> int | None:
        for total in (self.summary.get("max_steps"), self.of_config("trainer", "max_steps")):
            if isinstance(total, int):
                return total
        return None

    @property
    def tokens_per_s(self) -> float:
        """Median of the steps after the first ones; NaN where nothing was measured, or nobody counts tokens."""
        rates = finite(self.metrics.get("throughput/tokens_per_s", []))
        if not self.counts_tokens:
            return math.nan
        if rates:
            return statistics.median(rates[WARM_UP_ROWS:] or rates)
        return self.final("throughput/tokens_per_s")

    @property
    def counts_tokens(self) -> bool:
        """Not of pictures and recordings, whose runs measure none."""
        rates = finite(self.metrics.get("throughput/tokens_per_s", []))
        return any(rates) if rates else self.final("throughput/tokens_per_s") != 0

    @property
    def objective(self) -> Description:
        """What the run minimised."""
        chosen = self.config.get("objective")
        return description(str(chosen.get("name") if isinstance(chosen, Mapping) else None))

    @property
    def headline(self) -> float:
        """The objective's headline, at the end; what a run did not record follows from its held-out loss."""
        metric = self.objective.headline
        value, loss = number(self.of_summary("metrics", metric.key)), self.final("val/loss")
        if math.isnan(value) and metric.of_loss is not None and not math.isnan(loss):
            return metric.of_loss(loss)
        return self.final(metric.key)

    @property
    def baseline(self) -> float:
        """What the headline is compared with: the data's own figure, NaN where there is none."""
        name = self.objective.headline.baseline
        return math.nan if name is None else number(self.of_summary("data", name))

    @property
    def wall_s(self) -> float:
        """As recorded, else the sum of the steps' times."""
        recorded = number(self.summary.get("wall_s"))
        steps = finite(self.metrics.get("throughput/step_s", []))
        return sum(steps) if math.isnan(recorded) and steps else recorded

    @property
    def peak_gib(self) -> float:
        """Largest memory of a process, in GiB."""
        peaks = finite(self.metrics.get("memory/peak_gib", []))
        return max(peaks) if peaks else number(self.of_summary("memory", "peak_gib"))

    def final(self, column: str) -> float:
        """The last value of a metric: the summary's, else the last one in the metrics file; NaN if there is none."""
        recorded = number(self.of_summary("metrics", column))
        if not math.isnan(recorded):
            return recorded
        values = [value for value in self.metrics.get(column, []) if not math.isnan(value)]
        return values[-1] if values else math.nan

    def of_config(self, *keys: str) -> Any:
        return _reach(self.config, keys)

    def of_summary(self, *keys: str) -> Any:
        return _reach(self.summary, keys)


def load_run(paths: RunPaths) -> RunView:
    """Read a run's folder.

    Raises:
        RunFolderError: it is not one.
    """
    if not is_run_folder(paths.root):
        raise RunFolderError(_not_a_run(paths.root))
    view = RunView(paths)
    view.config_text = _text(paths.config, view.problems, MAX_CONFIG_BYTES)
    try:
        loaded = parse_yaml(view.config_text)
        view.config = loaded if isinstance(loaded, dict) else {}
    except yaml.YAMLError:
        view.problems.append(f"{paths.config.name} is not valid YAML")
    view.overrides = [line.strip() for line in _text(paths.overrides, view.problems).splitlines() if line.strip()]
    view.environment = _json(paths.environment, view.problems)
    view.summary = _json(paths.summary, view.problems)
    try:
        view.metrics = read_metrics(paths.metrics)
    except NotPlainError as error:
        view.problems.append(str(error))
    except OSError as error:
        view.problems.append(f"{paths.metrics.name}: {error.strerror}")
    view.samples = _samples(view)
    view.checkpoints = _checkpoints(paths.checkpoints)
    view.running = is_held(paths.lock)
    view.error, view.failed_rank = _error(view)
    if not view.error:
        view.error, view.failed_rank = _first_error(paths, view.problems)
    _hide_secrets(view)
    return view


def differing(views: list[RunView]) -> list[list[str]]:
    """For each run what sets it apart from the others, as ``key=value``: its own overrides, or, where all were
    started alike, the keys of the configuration that differ."""
    common = set(views[0].overrides).intersection(*(view.overrides for view in views)) if views else set()
    own = [[item for item in view.overrides if item not in common and not names_the_run(item)] for view in views]
    if any(own):
        return own
    flat = [leaves(view.config) for view in views]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if not names_the_run(key)]
    apart = [key for key in keys if len({repr(one.get(key)) for one in flat}) > 1]
    return [[f"{key}={setting(one.get(key))}" for key in apart] for one in flat]


def number(value: object) -> float:
    """``value`` if it is a number, else NaN."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _reach(tree: object, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _text(path: Path, problems: list[str], limit: int = MAX_JSON_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except NotPlainError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
    return ""


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _text(path, problems)
    try:
        loaded = parse_json(text, path) if text else {}
    except ValueError:
        problems.append(f"{path.name} is not valid JSON")
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _samples(view: RunView) -> list[tuple[int, list[dict[str, Any]]]]:
    try:
        by_step = dict(read_samples(view.paths.samples))
    except (OSError, NotPlainError) as error:
        view.problems.append(str(error))
        by_step = {}
    listed = view.summary.get("samples")
    last = [sample for sample in listed if isinstance(sample, dict)] if isinstance(listed, list) else []
    if last:
        by_step[view.steps] = last
    return sorted(by_step.items())


def _error(view: RunView) -> tuple[str, int | None]:
    """The summary's error, a text or a mapping with its ``message``, and the rank that had it."""
    error = view.summary.get("error")
    if not isinstance(error, Mapping):
        return str(error or ""), None
    return str(error.get("message") or ""), _rank(error)


def _rank(error: Mapping[str, Any]) -> int | None:
    rank = error.get("rank")
    return rank if isinstance(rank, int) and 0 <= rank < MOST_RANKS else None


def _first_error(paths: RunPaths, problems: list[str]) -> tuple[str, int | None]:
    """The message of the worker that failed first, and not because another one had, and its rank."""
    errors = [_json(file, problems) for file in sorted(paths.logs.glob("rank-*.error.json"))]
    errors.sort(key=lambda error: (bool(error.get("follows")), number(error.get("time"))))
    return (str(errors[0].get("message", "")), _rank(errors[0])) if errors else ("", None)


def _checkpoints(root: Path) -> list[Step]:
    """Every step's folder and its size; one without a manifest is not whole."""
    steps = []
    for step, suffix, path in layout.folders(root):
        if suffix == "" and path.is_dir():
            nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            faults = () if (path / layout.MANIFEST).is_file() else ("it has no manifest",)
            steps.append(Step(step, path, faults, nbytes=nbytes))
    return steps


def names_the_run(text: str) -> bool:
    return text.lstrip("+~").startswith(("run.", "hydra."))


def _hide_secrets(view: RunView) -> None:
    view.overrides = [redact.override(item) for item in view.overrides]
    view.environment = redact.tree(view.environment)
    config = redact.tree(view.config)
    if config != view.config:
        view.config = config
        view.config_text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _not_a_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: there is no such folder; give a run's folder, such as outputs/<name>/<date>_<time>-<hash>"
    if (folder / "manifest.json").is_file():
        return f"{folder}: this is a checkpoint; give its run's folder, {folder.parent.parent}"
    inside = find_runs(folder)
    if inside:
        return f"{folder}: not a run's folder, but it holds {len(inside)}; give one of them, such as {inside[0]}"
    return f"{folder}: not a run's folder (it has no config.yaml); give one such as outputs/<name>/<date>_<time>-<hash>"
