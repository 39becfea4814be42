"""What is wrong with ``eval.tasks``, before a run and before ``mgpu-pipe eval``. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError, raised_by

NAME = r"[a-z][a-z0-9_]*"
OWN_KEYS = {"pattern": "answers", "source": "answers", "max_new_tokens": "answers"}
"""Keys that one kind alone reads."""


def task_errors(config: RunConfig) -> Iterator[BadInputError]:
    """Everything wrong with the tasks; their files are read."""
    told = description(config.objective.name)
    known = {metric.key for metric in told.metrics}
    for name, task in config.eval.tasks.items():
        key = f"eval.tasks.{name}"
        if re.fullmatch(NAME, name) is None:
            yield ConfigError(key, task.kind, "use small letters, digits and _ for its name", "it becomes a metric's")
        elif f"val/{name}" in known:
            yield ConfigError(key, task.kind, "give it another name", f"the objective measures val/{name} itself")
        elif told.attention != "causal" or told.samples == "labelled_text":
            fix = "leave it out, or use objective=causal_lm"
            yield ConfigError(key, task.kind, fix, f"objective.name={told.name} trains no model that continues text")
        else:
            yield from list(_key_errors(config, name)) or raised_by(partial(_read, config, name))


def _key_errors(config: RunConfig, name: str) -> Iterator[ConfigError]:
    task, key = config.eval.tasks[name], f"eval.tasks.{name}"
    default = type(task)()
    for own, kind in OWN_KEYS.items():
        if getattr(task, own) != getattr(default, own) and task.kind != kind:
            reason = f"eval.tasks.{name}.kind={task.kind} does not read it"
            yield ConfigError(f"{key}.{own}", getattr(task, own), f"leave it out, or use kind={kind}", reason)
    if task.paths and task.source is not None:
        yield ConfigError(f"{key}.source", task.source, "give paths or source, not both", "there are paths")
    if not task.paths and task.source is None:
        also = ", or source=rule_chat" if task.kind == "answers" else ""
        yield ConfigError(f"{key}.paths", "[]", f"give files or globs{also}", "there is nothing to measure")


def _read(config: RunConfig, name: str) -> None:
    from mgpu_pipe.inference.tasks import rows_of

    rows_of(config.eval.tasks[name], name, config)
