"""Description of an objective for code without torch: its keys, its metrics and the kind of model that it trains.

The files ``*_keys`` of :mod:`mgpu_pipe.objectives`, which import no torch, have them. An installed package
registers its description in the entry point group ``mgpu_pipe.objective_keys`` under its objective's name; without
one, it has the keys and metrics of causal language modelling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.config import plugins
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from mgpu_pipe.config.group_keys import EvalConfig, EvalTask
    from mgpu_pipe.config.schema import ObjectiveConfig

DEFAULT = "causal_lm"
TRAINING_METRICS = ("train/loss", "train/grad_norm", "lr")
"""Metrics of every logged step."""


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluation.

    Attributes:
        key: name in metrics files and summaries.
        title: name in tables and reports.
        unit: text after the value.
        short: abbreviated title.
        digits: digits after the point in ``mgpu-pipe eval``.
        percent: whether the value is a share, shown as a percentage.
        higher_is_better: whether a higher value is better, as for an accuracy.
        headline: whether it is the main metric of a run.
        baseline: entry of the data's figures that it is compared with.
        of_loss: computes it from the held-out loss, for runs that did not record it.
    """

    key: str
    title: str
    unit: str = ""
    short: str = ""
    digits: int = 6
    percent: bool = False
    higher_is_better: bool = False
    headline: bool = False
    baseline: str | None = None
    of_loss: Callable[[float], float] | None = None

    @property
    def name(self) -> str:
        """``key`` without its section."""
        return self.key.partition("/")[2]


@dataclass(frozen=True)
class Description:
    """Keys, metrics and requirements of an objective.

    Attributes:
        name: ``objective.name``.
        keys: the dataclass of ``objective.*``, a subclass of ``ObjectiveConfig``.
        metrics: metrics of its evaluation; the held-out loss, ``val/loss``, first.
        measured: computes the metrics by key from the sums over the held-out samples: losses, the further sums of
            ``evaluation_sums`` and the loss denominator.
        counts: noun for the loss denominator.
        model_class: transformers' class that builds its models.
        samples: kind of data that it trains on; a package may bring another kind.
        families: model families that it trains; empty for all that pass the other checks.
        attention: attention between tokens: causal, bidirectional, encoder and decoder, or that of the
            model's own code.
        refused_axes: axes of ``strategy`` that the objective does not support.
        reads_margins: whether it reads by how much an answer is better than the other.
        joins_texts: whether a query and a document are one row of its model.
        alphabet: whether its targets are characters of an alphabet, not a tokenizer's tokens.
        other_names: other programs' names for the objective.
    """

    name: str
    keys: type[Any]
    metrics: tuple[Metric, ...]
    measured: Callable[[Sequence[float]], Mapping[str, float]]
    counts: str = "tokens"
    model_class: str = "AutoModelForCausalLM"
    samples: str = "packed_text"
    families: tuple[str, ...] = ()
    attention: Literal["causal", "bidirectional", "encoder_decoder", "own"] = "causal"
    refused_axes: tuple[str, ...] = ()
    reads_margins: bool = False
    joins_texts: bool = False
    alphabet: bool = False
    other_names: tuple[str, ...] = ()

    @property
    def headline(self) -> Metric:
        return next((metric for metric in self.metrics if metric.headline), self.metrics[0])

    def metric(self, key: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.key == key), None)

    @property
    def rankable_metrics(self) -> tuple[str, ...]:
        """Metrics that ``checkpoint.keep_best`` may rank by."""
        return (*TRAINING_METRICS, *(metric.key for metric in self.metrics))


def bits_per_byte(metrics: Mapping[str, float | None], tokens: int, size: int) -> dict[str, float]:
    """Held-out loss as bits a byte, for any vocabulary; empty without a perplexity, ``tokens`` or ``size`` in bytes."""
    loss = metrics.get("val/loss")
    if not size or loss is None or "val/perplexity" not in metrics:
        return {}
    return {"val/bits_per_byte": loss * tokens / (size * math.log(2))}


@functools.lru_cache(maxsize=None)
def description(name: str) -> Description:
    """Description of the objective ``name``, or of causal language modelling; ConfigError if a package has none."""
    group = plugins.OBJECTIVE_KEYS_GROUP
    if name not in plugins.OBJECTIVES and name in plugins.entry_names(group):
        loaded = plugins.load("objective.name", name, group)
        if not isinstance(loaded, Description):
            fix = f"register a {Description.__module__}.Description in {group}"
            raise ConfigError("objective.name", name, fix, f"what is registered there is a {type(loaded).__name__}")
        return loaded
    file, _, constant = plugins.OBJECTIVE_FILES.get(name, plugins.OBJECTIVE_FILES[DEFAULT])[0].partition(".")
    result: Description = getattr(import_module(f"mgpu_pipe.objectives.{file}"), constant)
    return result


def descriptions() -> list[Description]:
    """Descriptions of this project's objectives and of those of installed packages."""
    return [description(name) for name in (*plugins.OBJECTIVES, *plugins.entry_names(plugins.OBJECTIVE_KEYS_GROUP))]


def rankable_metrics(objective: ObjectiveConfig, evaluation: EvalConfig) -> tuple[str, ...]:
    """Metrics that ``checkpoint.keep_best`` and a sweep may rank by."""
    of_tasks = (metric.key for metric in task_metrics(evaluation.tasks))
    return (*description(objective.name).rankable_metrics, *of_tasks)


def metric_of(objective: ObjectiveConfig, evaluation: EvalConfig, key: str) -> Metric | None:
    """Metric ``key`` of the objective or of a task."""
    of_tasks = {metric.key: metric for metric in task_metrics(evaluation.tasks)}
    return of_tasks.get(key) or description(objective.name).metric(key)


def higher_is_better(config: Mapping[str, Any], key: str) -> bool:
    """Whether a higher value of the metric ``key`` is better, from a run's written configuration."""
    section = config
    for name in ("eval", "tasks", key.partition("/")[2]):
        below = section.get(name)
        section = below if isinstance(below, Mapping) else {}
    if section:
        return section.get("kind") != "perplexity"
    objective = config.get("objective")
    metric = description(str(objective.get("name") if isinstance(objective, Mapping) else None)).metric(key)
    return metric is not None and metric.higher_is_better


def task_metrics(tasks: Mapping[str, EvalTask]) -> tuple[Metric, ...]:
    """Metrics of the tasks, one each."""
    units = {"answers": "right", "choice": "right", "perplexity": ""}
    return tuple(
        Metric(
            f"val/{name}",
            name.replace("_", " "),
            units[task.kind],
            digits=3,
            percent=task.higher_is_better,
            higher_is_better=task.higher_is_better,
        )
        for name, task in tasks.items()
    )
