"""Checks that models, objectives, data and tasks fit, with fixes in the user's option names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from mgpu_pipe.config.data_sources import all_sources, samples_of
from mgpu_pipe.config.group_keys import EvalConfig
from mgpu_pipe.config.objective import Description, description, descriptions
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.errors import BadInputError, ConfigError, raised_by
from mgpu_pipe.models.fields import HEADLESS, given_fields, model_types
from mgpu_pipe.system.conf_folders import conf_dir

NAME = r"[a-z][a-z0-9_]*"
KIND_OF_KEY = {"pattern": "answers", "source": "answers", "max_new_tokens": "answers"}
"""The only kind of task that reads a key."""


def task_errors(keys: EvalConfig, objective: ObjectiveConfig, data: DataConfig) -> Iterator[BadInputError]:
    """Errors of the tasks; reads their files."""
    described = description(objective.name)
    known = {metric.key for metric in described.metrics}
    for name, task in keys.tasks.items():
        key = f"eval.tasks.{name}"
        if re.fullmatch(NAME, name) is None:
            yield ConfigError(key, task.kind, "use small letters, digits and _ for its name", "it becomes a metric's")
        elif f"val/{name}" in known:
            yield ConfigError(key, task.kind, "give it another name", f"the objective measures val/{name} itself")
        elif described.attention != "causal" or described.samples == "labelled_text":
            fix = "leave it out, or use objective=causal_lm"
            yield ConfigError(
                key, task.kind, fix, f"objective.name={objective.name} trains no model that continues text"
            )
        else:
            from mgpu_pipe.inference.tasks import rows_of

            yield from list(_key_errors(keys, name)) or raised_by(partial(rows_of, task, name, data.text_column))


def _key_errors(evaluation: EvalConfig, name: str) -> Iterator[ConfigError]:
    task, key = evaluation.tasks[name], f"eval.tasks.{name}"
    default = type(task)()
    for option, kind in KIND_OF_KEY.items():
        if getattr(task, option) != getattr(default, option) and task.kind != kind:
            reason = f"eval.tasks.{name}.kind={task.kind} does not read it"
            yield ConfigError(f"{key}.{option}", getattr(task, option), f"leave it out, or use kind={kind}", reason)
    if task.paths and task.source is not None:
        yield ConfigError(f"{key}.source", task.source, "give paths or source, not both", "there are paths")
    if not task.paths and task.source is None:
        also = ", or source=rule_chat" if task.kind == "answers" else ""
        yield ConfigError(f"{key}.paths", "[]", f"give files or globs{also}", "there is nothing to measure")


NAMED = 4
"""Most models in a fix."""
TYPE = re.compile(r"^type: (\S+)", re.MULTILINE)
DEFAULT_SAMPLES = "packed_text"
"""Samples of the default data: a user who has them chose the objective, and left the data out."""


def sample_errors(data: DataConfig, objective: ObjectiveConfig) -> list[ConfigError]:
    """An error if the objective does not train on this kind of data; never for a plug-in's data."""
    source, trained = data.source, description(objective.name)
    samples = samples_of(source)
    if samples in ("", trained.samples):
        return []
    others = [f"objective={other.name}" for other in descriptions() if other.samples == samples != DEFAULT_SAMPLES]
    reason = f"objective.name={objective.name} trains on {trained.samples.replace('_', ' ')}"
    return [ConfigError("data.source", source, f"use {_join_options(*others, *fitting_data(trained))}", reason)]


def model_fix(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, fix: str) -> str:
    """Fix for a model that the objective cannot train: shipped models and data, other objectives, or ``fix``."""
    if fix.endswith("?"):
        return fix
    trained = description(objective.name)
    models = fitting_models(trained)
    fix = f"{fix} ({_join_options(*models)})" if models else fix
    if sample_errors(data, objective):
        fix = f"{fix} with {_join_options(*fitting_data(trained))}"
    others = fitting_objectives(str(given_fields(model).get("model_type", model.type)))
    return f"{fix}, or {others}" if others else fix


def fitting_data(objective: Description) -> list[str]:
    """The options of ``data`` that the objective trains on, such as ``data=digits``, ``data=image_folder``."""
    return [f"data={source.name}" for source in all_sources() if source.samples == objective.samples]


def fitting_models(objective: Description) -> list[str]:
    """At most :data:`NAMED` shipped models that the objective trains, such as ``model=vit_b16``; small ones first."""
    types = objective.families or model_types(objective.model_class)
    apart = [other for other in descriptions() if other.name != objective.name and other.model_class != HEADLESS]
    others = {family for other in apart for family in other.families}
    taken = set(types) if objective.families else set(types) - others
    fitting = [name for name, kind in _shipped_models() if kind in taken]
    return [f"model={name}" for name in sorted(fitting, key=lambda name: not name.endswith("_tiny"))[:NAMED]]


def fitting_objectives(model_type: str) -> str:
    """The objectives that list a model type among their families, as ``objective=masked_lm``."""
    return _join_options(*(f"objective={known.name}" for known in descriptions() if model_type in known.families))


def _join_options(*options: str) -> str:
    """``a, b or c``."""
    *most, last = options or ("",)
    return f"{', '.join(most)} or {last}" if most else last


def _shipped_models() -> Iterator[tuple[str, str]]:
    """Every option of ``model`` that names a type, with that type."""
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        kind = TYPE.search(path.read_text(encoding="utf-8"))
        if kind is not None and kind[1] != "null":
            yield path.stem, kind[1]
