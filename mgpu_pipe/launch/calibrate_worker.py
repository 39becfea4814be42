"""Worker that measures its machine: ``python -m mgpu_pipe.launch.calibrate_worker <folder>``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.launch.worker import leave_error
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import Lifeline, exit_now

MEASURED = "hardware.json"


def main(folder: Path) -> None:
    """Measure as one worker; an error is written for the supervisor and ends the process."""
    lifeline = Lifeline.attach(os.environ)
    from mgpu_pipe.config.freeze import load
    from mgpu_pipe.launch.distributed import World, launcher_store, process_group

    paths, world = RunPaths(folder), World.from_environment(os.environ)
    try:
        if lifeline is not None:
            lifeline.wait_for_go()
        import torch

        from mgpu_pipe.training.profiling.measure_hardware import measure_hardware

        config = load(paths.config)
        kind, store = device_type(config), launcher_store(world, config.launch.collective_timeout)
        with process_group(world, store, kind, config.launch.collective_timeout):
            device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
            measured = measure_hardware(device)
        if world.rank == 0:
            replace_file(paths.root / MEASURED, json.dumps(asdict(measured)))
    except BaseException as error:
        leave_error(paths, error, world.rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
