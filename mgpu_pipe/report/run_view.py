"""Reads a run's folder for the tables and the report.

A run that failed, still trains, or was copied without some files has a report too. So each file may be missing or
broken; :attr:`RunView.problems` names the broken ones.
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
from mgpu_pipe.checkpoint.layout import Step
from mgpu_pipe.config.convert import leaves, setting
from mgpu_pipe.config.objective import Description, description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.report.logs import redact_override, redact_tree
from mgpu_pipe.runs import history
from mgpu_pipe.runs.latest import find_runs, is_run_folder
from mgpu_pipe.runs.listing import strategies_of_attempts
from mgpu_pipe.runs.lock import is_held
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.runs.record import read_samples
from mgpu_pipe.system.local_files import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    NotPlainError,
    is_file,
    is_folder,
    parse_json,
    parse_yaml,
    read_bytes,
)

MOST_RANKS = 1 << 20
WARM_UP_ROWS = 2
"""First rows to skip in the median throughput, because they compile and fill caches."""


@dataclass
class RunView:
    """Contents of a run's folder."""

    paths: RunPaths
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    samples: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """Step and samples of each sampling, the last ones at the end."""
    checkpoints: list[Step] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """History of the run's launches, with killed ones; empty for runs of earlier versions."""
    strategies: list[str] = field(default_factory=list)
    """Strategies of the attempts in order, each once."""
    error: str = ""
    failed_rank: int | None = None
    running: bool = False
    """Whether a launch holds the folder's lock."""
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.config_value("run", "name") or self.paths.root.parent.name)

    @property
    def folder_name(self) -> str:
        return self.paths.root.name

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, ``running``, or ``unfinished`` for a killed run."""
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
        for total in (self.summary.get("max_steps"), self.config_value("trainer", "max_steps")):
            if isinstance(total, int):
                return total
        return None

    @property
    def tokens_per_s(self) -> float:
        """Median after the first steps; NaN without measurements or for a run that counts no tokens."""
        rates = finite(self.metrics.get("throughput/tokens_per_s", []))
        if not self.counts_tokens:
            return math.nan
        if rates:
            return statistics.median(rates[WARM_UP_ROWS:] or rates)
        return self.final("throughput/tokens_per_s")

    @property
    def counts_tokens(self) -> bool:
        """Whether the run measured tokens; runs on pictures and recordings measure none."""
        rates = finite(self.metrics.get("throughput/tokens_per_s", []))
        return any(rates) if rates else self.final("throughput/tokens_per_s") != 0

    @property
    def objective(self) -> Description:
        """Description of the run's objective."""
        chosen = self.config.get("objective")
        return description(str(chosen.get("name") if isinstance(chosen, Mapping) else None))

    @property
    def headline(self) -> float:
        """The final value of the objective's headline metric, computed from the held-out loss if it is not recorded."""
        metric = self.objective.headline
        value, loss = number(self.summary_value("metrics", metric.key)), self.final("val/loss")
        if math.isnan(value) and metric.of_loss is not None and not math.isnan(loss):
            return metric.of_loss(loss)
        return self.final(metric.key)

    @property
    def baseline(self) -> float:
        """The data's baseline of the headline metric; NaN for none."""
        name = self.objective.headline.baseline
        return math.nan if name is None else number(self.summary_value("data", name))

    @property
    def wall_s(self) -> float:
        """Seconds of all attempts: the recorded time, else up to the last logged step, else the sum of step times."""
        recorded = number(self.summary.get("wall_s"))
        if math.isnan(recorded) and self.attempts:
            return history.wall_s(self.attempts, history.last_sign(self.paths))
        steps = finite(self.metrics.get("throughput/step_s", []))
        return sum(steps) if math.isnan(recorded) and steps else recorded

    @property
    def num_attempts(self) -> int:
        """Number of starts and resumes, with restarts after a crash."""
        recorded = self.summary.get("attempts")
        numbered = [number for entry in self.attempts if isinstance(number := entry.get("attempt"), int)]
        return max(recorded if isinstance(recorded, int) else 0, len(self.attempts), *numbered, 1)

    @property
    def peak_gib(self) -> float:
        """Largest memory of a process, in GiB."""
        peaks = finite(self.metrics.get("memory/peak_gib", []))
        return max(peaks) if peaks else number(self.summary_value("memory", "peak_gib"))

    def final(self, column: str) -> float:
        """The last value of a metric, from the summary or else from the metrics file; NaN if there is none."""
        recorded = number(self.summary_value("metrics", column))
        if not math.isnan(recorded):
            return recorded
        values = [value for value in self.metrics.get(column, []) if not math.isnan(value)]
        return values[-1] if values else math.nan

    def config_value(self, *keys: str) -> Any:
        return _look_up(self.config, keys)

    def summary_value(self, *keys: str) -> Any:
        return _look_up(self.summary, keys)


def load_run(paths: RunPaths) -> RunView:
    """Read a run's folder; RunFolderError for another folder."""
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
    view.attempts = history.read(paths)
    view.strategies = strategies_of_attempts(paths)
    view.running = is_held(paths.lock)
    view.error, view.failed_rank = _error(view)
    if not view.error:
        view.error, view.failed_rank = _first_error(paths, view.problems)
    _hide_secrets(view)
    return view


def differing(views: list[RunView]) -> list[list[str]]:
    """Differences of each run from the others as ``key=value``: overrides, else configuration keys."""
    common = set(views[0].overrides).intersection(*(view.overrides for view in views)) if views else set()
    overrides = [[item for item in view.overrides if item not in common and not names_the_run(item)] for view in views]
    if any(overrides):
        return overrides
    flat = [leaves(view.config) for view in views]
    keys = [
        key for key in dict.fromkeys(key for values_by_key in flat for key in values_by_key) if not names_the_run(key)
    ]
    keys_apart = [key for key in keys if len({repr(values_by_key.get(key)) for values_by_key in flat}) > 1]
    return [[f"{key}={setting(values_by_key.get(key))}" for key in keys_apart] for values_by_key in flat]


def number(value: object) -> float:
    """``value`` if it is a number, else NaN."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _look_up(tree: object, keys: tuple[str, ...]) -> Any:
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
    """Message and rank of the summary's error, which is a text or a mapping."""
    error = view.summary.get("error")
    if not isinstance(error, Mapping):
        return str(error or ""), None
    return str(error.get("message") or ""), _rank(error)


def _rank(error: Mapping[str, Any]) -> int | None:
    rank = error.get("rank")
    return rank if isinstance(rank, int) and 0 <= rank < MOST_RANKS else None


def _first_error(paths: RunPaths, problems: list[str]) -> tuple[str, int | None]:
    """Message and rank of the worker that failed first, preferring errors that do not follow another worker's."""
    errors = [_json(file, problems) for file in sorted(paths.logs.glob("rank-*.error.json"))]
    errors.sort(key=lambda error: (bool(error.get("follows")), number(error.get("time"))))
    return (str(errors[0].get("message", "")), _rank(errors[0])) if errors else ("", None)


def _checkpoints(root: Path) -> list[Step]:
    """Every step with its folder's size; a step without a manifest is incomplete."""
    steps = []
    for step, suffix, path in layout.folders(root):
        if suffix == "" and is_folder(path):
            nbytes = sum(file.stat().st_size for file in path.iterdir() if is_file(file))
            faults = () if is_file(path / layout.MANIFEST) else ("it has no manifest",)
            steps.append(Step(step, path, faults, nbytes=nbytes))
    return steps


def names_the_run(text: str) -> bool:
    return text.lstrip("+~").startswith(("run.", "hydra."))


def _hide_secrets(view: RunView) -> None:
    view.overrides = [redact_override(item) for item in view.overrides]
    view.environment = redact_tree(view.environment)
    config = redact_tree(view.config)
    if config != view.config:
        view.config = config
        view.config_text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _not_a_run(folder: Path) -> str:
    if not is_folder(folder):
        return f"{folder}: no such folder; give a run's folder, such as outputs/<name>/<date>_<time>-<hash>"
    if is_file(folder / "manifest.json"):
        return f"{folder}: this is a checkpoint; give its run's folder, {folder.parent.parent}"
    inside = find_runs(folder)
    if inside:
        return f"{folder}: not a run's folder, but it holds {len(inside)}; give one of them, such as {inside[0]}"
    return f"{folder}: not a run's folder (it has no config.yaml); give one such as outputs/<name>/<date>_<time>-<hash>"
