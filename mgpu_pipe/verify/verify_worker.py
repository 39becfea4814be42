"""Process of a verification: ``python -m mgpu_pipe.verify.verify_worker <folder>``, started by :mod:`.driver`.

It reads the small run's frozen configuration. Rank 0 writes the results to ``comparison.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.import_path import allow_own_classes
from mgpu_pipe.launch.worker import leave_error
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import Lifeline, exit_now

COMPARISON = "comparison.json"


def main(folder: Path) -> None:
    """Takes part in the comparison. An error is written for the supervisor and ends the process."""
    lifeline = Lifeline.attach(os.environ)
    from mgpu_pipe.launch.distributed import World

    paths, world = RunPaths(folder), World.from_environment(os.environ)
    try:
        _run(paths, world.rank, lifeline)
    except BaseException as error:
        leave_error(paths, error, world.rank)


def _run(paths: RunPaths, rank: int, lifeline: Lifeline | None) -> None:
    import torch

    from mgpu_pipe.config.freeze import load
    from mgpu_pipe.launch.distributed import World, launcher_store, process_group
    from mgpu_pipe.verify.certificate import worst_of
    from mgpu_pipe.verify.comparison import compare

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    world = World.from_environment(os.environ)
    if lifeline is not None:
        lifeline.wait_for_go()
    allow_own_classes()
    config = load(paths.config)
    timeout = config.launch.collective_timeout
    with process_group(world, launcher_store(world, timeout), "cpu", timeout):
        measurements = compare(config)
    if rank == 0:
        worst = [comparison.as_dict() for comparison in worst_of(measurements)]
        compared = {"worst": worst, "comparisons": len(measurements)}
        replace_file(paths.root / COMPARISON, json.dumps(compared))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
