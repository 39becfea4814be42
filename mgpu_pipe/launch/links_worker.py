"""Worker that measures its links: ``python -m mgpu_pipe.launch.links_worker <folder>``, or a joined rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK
from mgpu_pipe.launch.worker import leave_error
from mgpu_pipe.report.measurements import show_links as show
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import Lifeline, exit_now

if TYPE_CHECKING:
    from torch.distributed import Store

    from mgpu_pipe.launch.distributed import World
    from mgpu_pipe.training.profiling.link_table import Link

FOUND = "links.json"


def main(folder: Path) -> None:
    """Measure as one worker; an error is written for the supervisor and ends the process."""
    lifeline = Lifeline.attach(os.environ)
    from mgpu_pipe.config.freeze import load
    from mgpu_pipe.launch.distributed import World, launcher_store

    paths, world = RunPaths(folder), World.from_environment(os.environ)
    try:
        if lifeline is not None:
            lifeline.wait_for_go()
        config = load(paths.config)
        links = _measured(world, launcher_store(world, config.launch.collective_timeout), config)
        if world.rank == 0:
            replace_file(paths.root / FOUND, json.dumps([asdict(link) for link in links]))
    except BaseException as error:
        leave_error(paths, error, world.rank)


def measure_joined(config: RunConfig, joined: Mapping[str, str]) -> int:
    """Measure as a rank of the joined world; rank 0 prints."""
    from mgpu_pipe.launch.distributed import World
    from mgpu_pipe.launch.join import check_world, rendezvous
    from mgpu_pipe.launch.workers import worker_environment

    os.environ.update(joined)
    world = World.from_environment(os.environ)
    check_world(config, world)
    os.environ.update(worker_environment(1, one_host=world.local_world_size == world.world_size))
    links = _measured(world, rendezvous(config), config)
    if world.rank == 0:
        show(links, config)
    return EXIT_OK


def _measured(world: World, store: Store, config: RunConfig) -> list[Link]:
    import torch

    from mgpu_pipe.launch.distributed import process_group
    from mgpu_pipe.training.profiling.measure_links import measure_links

    kind = device_type(config)
    with process_group(world, store, kind, config.launch.collective_timeout):
        return measure_links(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
