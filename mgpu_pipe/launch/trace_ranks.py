"""Traces ranks of a layout in child processes, one a core at once; see :mod:`.trace_rank`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mgpu_pipe.errors import EXIT_BAD_INPUT, BadInputError, ConfigError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.system.child_process import bound

TRACER = "mgpu_pipe.training.tracing.trace_rank"
ERROR = "error: "


def trace_ranks(ranks: Sequence[int], world: int, words: Sequence[str], model_type: str) -> list[dict[str, Any]]:
    """The traces of ``ranks`` of a world of ``world``.

    Args:
        words: options and overrides that compose the layout.
        model_type: of the model, for an error.

    Raises:
        BadInputError: the pretended GPU cannot be made here.
        ConfigError: the model does not run on fake tensors.
    """

    def trace(rank: int) -> dict[str, Any]:
        command = bound(python_module(TRACER, str(rank), str(world), *words))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            if done.returncode == EXIT_BAD_INPUT:
                raise BadInputError(last.removeprefix(ERROR))
            reason = f"this model does not run on fake tensors: {last}"
            raise ConfigError("model.type", model_type, "plan without --trace", reason)
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures

    with ThreadPoolExecutor(max(1, min(len(ranks), os.cpu_count() or 1))) as pool:
        return list(pool.map(trace, ranks))
