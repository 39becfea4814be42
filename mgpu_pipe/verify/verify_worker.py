"""Process of a verification: ``python -m mgpu_pipe.verify.verify_worker <folder>``, started by :mod:`.driver`.

It reads the small run's frozen configuration. Rank 0 writes the results to ``comparison.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.launch.worker import work_with_others
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import exit_now
from mgpu_pipe.verify.certificate import Measurement, worst_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from mgpu_pipe.launch.distributed import World

COMPARISON = "comparison.json"


def main(folder: Path) -> None:
    """Take part in the comparison; rank 0 writes its result into ``folder``."""

    def work(config: RunConfig, world: World, store: Store) -> None:
        measurements = _measure(config, world, store)
        if world.rank == 0:
            worst = [comparison.as_dict() for comparison in worst_of(measurements)]
            replace_file(folder / COMPARISON, json.dumps({"worst": worst, "comparisons": len(measurements)}))

    work_with_others(folder, work)


def _measure(config: RunConfig, world: World, store: Store) -> list[Measurement]:
    import torch

    from mgpu_pipe.launch.distributed import process_group
    from mgpu_pipe.verify.comparison import compare

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    with process_group(world, store, "cpu", config.launch.collective_timeout):
        return compare(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
