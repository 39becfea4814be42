"""Worker that measures: ``python -m mgpu_pipe.launch.measure_worker <folder> hardware|links``, or a joined rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import LaunchConfig, RunConfig, TrainerConfig
from mgpu_pipe.launch.worker import work_with_others
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import exit_now

if TYPE_CHECKING:
    from torch.distributed import Store

    from mgpu_pipe.launch.distributed import World

HARDWARE, LINKS = "hardware", "links"
"""Subjects of a measurement."""
RESULT = "measured.json"


def main(folder: Path, subject: str) -> None:
    """Measure as one worker; rank 0 writes the result into ``folder``."""

    def work(config: RunConfig, world: World, store: Store) -> None:
        result = _measure(config.trainer, config.launch, world, store, subject)
        if world.rank == 0:
            replace_file(folder / RESULT, json.dumps(result))

    work_with_others(folder, work)


def measure_joined(config: RunConfig, joined: Mapping[str, str], subject: str) -> Any:
    """Measure as a rank of the joined world; the result on rank 0, None on others."""
    from mgpu_pipe.launch.distributed import World
    from mgpu_pipe.launch.join import check_world, rendezvous
    from mgpu_pipe.launch.workers import worker_environment

    os.environ.update(joined)
    world = World.from_environment(os.environ)
    check_world(config, world)
    os.environ.update(worker_environment(1, one_host=world.local_world_size == world.world_size))
    result = _measure(config.trainer, config.launch, world, rendezvous(config.launch), subject)
    return result if world.rank == 0 else None


def _measure(trainer: TrainerConfig, launch: LaunchConfig, world: World, store: Store, subject: str) -> Any:
    """JSON of what this rank measures together with all others."""
    import torch

    from mgpu_pipe.launch.distributed import process_group
    from mgpu_pipe.training.profiling.measure_hardware import measure_hardware
    from mgpu_pipe.training.profiling.measure_links import measure_links

    kind = device_type(trainer)
    with process_group(world, store, kind, launch.collective_timeout):
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        if subject == LINKS:
            return [asdict(link) for link in measure_links(device)]
        return asdict(measure_hardware(device))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    exit_now(0)
