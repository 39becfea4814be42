"""Small runs by Liger's kernels under a strategy, in Triton's interpreter, beside one process; a program like
:mod:`tests.kernels.liger_steps`. Prints by configuration what went over its bound, as JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.liger_strategies <overrides of a configuration> ...
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.models.build import run_model
from mgpu_pipe.models.kernels.layers import use_liger
from mgpu_pipe.verify import comparison
from mgpu_pipe.verify.certificate import Worst
from tests.kernels.liger_steps import CALLS, interpret
from tests.support.processes import run_processes
from tests.verify.support import small_run, verified


def by_liger(config: RunConfig) -> tuple[list[Worst], int]:
    """The comparison with one process, whose norms and feed-forward layers are torch's; and calls of kernels."""

    def changed(config: RunConfig) -> Any:
        model = run_model(config)
        use_liger(model)
        return model

    interpret()
    comparison.run_model = changed
    return verified(config), sum(CALLS.values())


def main() -> None:
    told = {}
    for overrides in sys.argv[1:]:
        config = small_run(*overrides.split(), steps=2)
        found = run_processes(int(config.trainer.devices), by_liger, config)
        worst = {one.quantity: one.error for one in found[0][0]}
        over = [str(one) for one in found[0][0] if not one.passed]
        told[overrides] = {"worst": worst, "over": over, "calls": [calls for _, calls in found]}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
