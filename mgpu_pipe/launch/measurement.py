"""Measures this machine by several processes: its hardware for ``calibrate``, its links for ``doctor links``.

``python -m mgpu_pipe.launch.measurement <folder> hardware|links`` is one of them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, devices_per_node, world_size
from mgpu_pipe.config.schema import LaunchConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import EXIT_FAILURE, BadInputError, ConfigError, MgpuError, print_line, print_text
from mgpu_pipe.launch.process_job import supervise_module, temporary_folder
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import Outcome
from mgpu_pipe.launch.worker import join_workers
from mgpu_pipe.launch.world import enter, is_node_task, joined_store
from mgpu_pipe.planning.calibration import Measurements
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import exit_now
from mgpu_pipe.training.profiling.link_table import Link

if TYPE_CHECKING:
    from torch.distributed import Store

    from mgpu_pipe.launch.world import World

HARDWARE, LINKS = "hardware", "links"
"""Subjects of a measurement."""
RESULT = "measured.json"


class MeasurementError(MgpuError):
    """A measuring process failed, or a signal stopped it. Its exit code is the command's."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def measure_hardware(config: RunConfig) -> Measurements:
    """Measure this machine by ``trainer.devices`` processes at once; ConfigError for several nodes, or
    MeasurementError."""
    if config.trainer.num_nodes > 1 or existing_world(os.environ):
        fix = "calibrate on one of them; write network_gb_s, what a node sends, into the profile"
        raise ConfigError("trainer.num_nodes", config.trainer.num_nodes, fix, "one node's processes are measured")
    return Measurements(**_measure_here(config, world_size(config.trainer, config.strategy), HARDWARE))


def measure_links(config: RunConfig) -> list[Link]:
    """Measure the links of the configured processes, or of the world that this process joined.

    Returns:
        The links; empty on a joined rank other than 0.

    Raises:
        BadInputError: there is no link, or this command cannot start the processes.
        MeasurementError: see there.
    """
    trainer, launch, joined = config.trainer, config.launch, existing_world(os.environ)
    processes = int(joined["WORLD_SIZE"]) if joined else world_size(config.trainer, config.strategy)
    if joined:
        if is_node_task(joined, devices_per_node(config.trainer, config.strategy)):
            raise BadInputError("doctor links: start one task a process: srun --ntasks-per-node=<devices>")
    elif trainer.num_nodes > 1:
        fix, reason = "start it on every node, by srun or torchrun", "this command starts processes on one machine only"
        raise ConfigError("trainer.num_nodes", trainer.num_nodes, fix, reason)
    if processes == 1:
        raise ConfigError("trainer.devices", processes, "use at least 2", "one process has no link")
    if joined.get("RANK", "0") == "0":
        count = processes * (processes - 1) // 2
        links = f"{count} link{'s' if count > 1 else ''}"
        print_line(f"measuring {links} of {processes} processes", file=sys.stderr, flush=True)
    if joined:
        world = enter(joined, trainer, config.strategy, 1)
        records = _measure(trainer, launch, world, joined_store(launch.collective_timeout), LINKS)
        return [Link(**record) for record in records if world.rank == 0]
    return [Link(**record) for record in _measure_here(config, processes, LINKS)]


def _measure_here(config: RunConfig, processes: int, subject: str) -> Any:
    """JSON that the first of new processes measured."""
    with temporary_folder(subject) as folder, SignalInbox() as inbox:
        freeze(config, RunPaths(folder).config, flush=False)
        module, threads = "mgpu_pipe.launch.measurement", config.launch.threads_per_worker
        outcome = supervise_module(module, folder, subject, processes=processes, threads=threads, inbox=inbox)
        if outcome.status != "finished":
            _raise(outcome)
        return json.loads((folder / RESULT).read_text(encoding="utf-8"))


def _raise(outcome: Outcome) -> NoReturn:
    """Raise why the processes failed; a defect's traceback is printed before."""
    text = outcome.failure.show() if outcome.failure is not None else outcome.message or "stopped"
    *traceback, reason = text.splitlines()
    if traceback:
        print_text("\n".join(traceback), file=sys.stderr)
    raise MeasurementError(reason.removeprefix("error: "), outcome.exit_code or EXIT_FAILURE)


def main(folder: Path, subject: str) -> None:
    """Measure as one worker; rank 0 writes the result into ``folder``."""
    with join_workers(folder) as (config, world, store):
        result = _measure(config.trainer, config.launch, world, store, subject)
        if world.rank == 0:
            replace_file(folder / RESULT, json.dumps(result))


def _measure(trainer: TrainerConfig, launch: LaunchConfig, world: World, store: Store, subject: str) -> Any:
    """JSON of what this rank measures together with all others."""
    from mgpu_pipe.launch.process_group import process_group
    from mgpu_pipe.training.profiling.measure_hardware import measure_hardware, measure_links

    with process_group(world, store, device_type(trainer), launch.collective_timeout) as device:
        if subject == LINKS:
            return [asdict(link) for link in measure_links(device)]
        return asdict(measure_hardware(device))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    exit_now(0)
