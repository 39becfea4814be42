"""The run's tasks, measured at every evaluation, under its strategy."""

from __future__ import annotations

from typing import Any

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.generation import load_tokenizer
from mgpu_pipe.inference.tasks import Measured, measure, rows_of
from mgpu_pipe.inference.tasks.judge import Judge
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.strategies.base import EngineStrategy


class RunTasks:
    """See the module. A collective call measures them all.

    Attributes:
        measured: what the last one gave, by the task's name.
    """

    def __init__(self, config: RunConfig, prepared: Prepared, objective: Objective, strategy: EngineStrategy) -> None:
        folder = prepared.tokenizer_folder
        if folder is None:
            raise BadInputError(f"eval.tasks: data.source={config.data.source} has no tokenizer; leave the tasks out")
        self._tasks = config.eval.tasks
        self._rows = {name: rows_of(task, name, config) for name, task in self._tasks.items()}
        self._judge = Judge(objective, load_tokenizer(folder), chat_of(folder), config.data.seq_len, strategy)
        self.measured: dict[str, Measured] = {}

    def __call__(self) -> dict[str, float]:
        """The tasks' figures, by metric."""
        for name, task in self._tasks.items():
            self.measured[name] = measure(self._rows[name], task, self._judge)
        return {f"val/{name}": result.value for name, result in self.measured.items()}

    def told(self) -> dict[str, Any]:
        """What the summary keeps of each."""
        return {name: {"counted": one.counted, "shown": one.shown} for name, one in self.measured.items()}
