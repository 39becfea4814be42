"""Measures lm-eval's tasks on a model."""

from __future__ import annotations

import logging
import os
from typing import Any

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.harness.harness_settings import HarnessSettings


def stay_offline() -> None:
    """Keep libraries from downloading, unless the user's environment allows it; before they are imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")


def measure_tasks(settings: HarnessSettings, model: Any) -> dict[str, Any]:
    """The harness's results of all tasks: ``results``, ``samples``, ``versions`` and more. A collective call.

    The harness gives them to rank 0; other ranks get none.

    Args:
        model: a :class:`mgpu_pipe.inference.harness.model.HarnessModel`.

    Raises:
        BadInputError: there is no such task, or its data is not on this machine.
    """
    from lm_eval import evaluator, utils

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not settings.runs_code:
        utils.env = _sandbox(utils.env)
    manager = index_tasks(settings)
    unknown = [name for name in settings.tasks if not manager.match_tasks([name])]
    if unknown:
        raise BadInputError(f"--harness={unknown[0]}: no such task; name one of lm-eval, or give --harness-path FOLDER")
    try:
        results: dict[str, Any] | None = evaluator.simple_evaluate(
            model=model,
            tasks=list(settings.tasks),
            task_manager=manager,
            num_fewshot=settings.few_shot,
            limit=settings.limit,
            bootstrap_iters=0,
        )
    except (ConnectionError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())[:300]
        fix = "give tasks of local files by --harness-path, or set HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0"
        raise BadInputError(f"--harness: the data of a task is not on this machine ({reason}); {fix}") from error
    return results or {}


def index_tasks(settings: HarnessSettings) -> Any:
    """An lm-eval ``TaskManager`` of the given folders' tasks, and of lm-eval's own thousands only where these are
    needed: reading them takes seconds."""
    from lm_eval.tasks import TaskManager

    if settings.paths:
        manager = TaskManager(include_path=settings.paths, include_defaults=False)
        if {*settings.tasks} <= {*manager.all_subtasks}:  # a group may name tasks of lm-eval's
            return manager
    return TaskManager(include_path=settings.paths or None)


def _sandbox(environment: Any) -> Any:
    """A copy of lm-eval's environment of templates in which a template cannot run code."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    sandbox.filters.update(environment.filters)
    return sandbox
