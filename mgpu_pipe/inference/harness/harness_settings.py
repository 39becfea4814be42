"""Settings of an evaluation by lm-eval; without torch, for the command that starts its processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from mgpu_pipe.errors import BadInputError

INSTALL = "pip install 'mgpu_pipe[harness]'"


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of an evaluation.

    Attributes:
        model: folder of the step or the model.
        tasks: names of tasks or groups.
        paths: folders of task files.
        runs_code: whether task files may name Python code.
        limit: most samples of a task; None for all.
        few_shot: examples before a question; None for the task's own number.
        average: whether the weights are the average (``--weights ema``).
    """

    model: str
    tasks: list[str]
    paths: list[str] = field(default_factory=list)
    runs_code: bool = False
    batch_size: int = 8
    limit: int | None = None
    few_shot: int | None = None
    average: bool = False
    frozen_weights: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HarnessSettings:
        return cls(**json.loads(text))

    @property
    def frozen_folder(self) -> Path | None:
        """Folder of the weights that the checkpoint leaves out."""
        return None if self.frozen_weights is None else Path(self.frozen_weights)


def require_harness() -> None:
    """Refuse without lm-eval.

    Raises:
        BadInputError: it is not installed.
    """
    if find_spec("lm_eval") is None:
        raise BadInputError(f"--harness: needs the package lm-eval; install it: {INSTALL}")
