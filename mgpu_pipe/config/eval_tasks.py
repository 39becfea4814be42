"""Keys of evaluation tasks, next to the held-out loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.config.objective import Metric, description

if TYPE_CHECKING:
    from mgpu_pipe.config.schema import ObjectiveConfig


@dataclass
class EvalTask:
    """A task of questions or texts from local files; its figure is the metric val/<name of the task>."""

    kind: Literal["answers", "choice", "perplexity"] = "answers"
    """answers: the share of generated answers that are right, word for word; choice: of questions whose right choice
    is the likeliest; perplexity: of texts, a token."""
    paths: list[str] = field(default_factory=list)
    """Files or globs: lines as in data=chat_jsonl (answers), of {prompt, choices, answer} (choice), text files or JSON
    lines with a text (perplexity)."""
    source: Literal["rule_chat"] | None = None
    """Instead of paths: the held-out conversations of data=rule_chat (answers)."""
    pattern: str | None = None
    """Regular expression; its match in an answer (the first group, if any) is compared (answers)."""
    max_samples: int | None = field(default=256, metadata={"at_least": 1})
    """At most this many rows, evenly taken; null takes all."""
    batch_size: int = field(default=32, metadata={"at_least": 1})
    """Rows that go through the model together."""
    max_new_tokens: int = field(default=64, metadata={"at_least": 1})
    """Most tokens of an answer."""

    @property
    def higher_is_better(self) -> bool:
        return self.kind != "perplexity"


@dataclass
class EvalConfig:
    tasks: dict[str, EvalTask] = field(default_factory=dict)
    """Tasks by a name of your choice, measured at every evaluation, and by mgpu-pipe eval."""


def ranked(objective: ObjectiveConfig, evaluation: EvalConfig) -> tuple[str, ...]:
    """Metrics that ``checkpoint.keep_best`` and a sweep may rank by."""
    of_tasks = (metric.key for metric in task_metrics(evaluation.tasks))
    return (*description(objective.name).ranked, *of_tasks)


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
