"""``mgpu-pipe doctor``: measures the time of a step by cause, or the links between ranks."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, print_line

if TYPE_CHECKING:
    from mgpu_pipe.config.hydra.compose import Composition
    from mgpu_pipe.config.schema import TrainerConfig

DESCRIPTION = (
    "Run a few steps of the configuration, save nothing, and print where the time of a\n"
    "step goes on each rank: compute, waiting for other ranks and transfer along each\n"
    "axis, the optimizer, data, the host; and what memory its phases take. Names a slow\n"
    "rank and the key that would help.\n"
    "doctor links measures the link of every pair of ranks instead, and names a slow one."
)
LINKS = "links"
WARM_UP, MEASURED = 2, 4
"""Steps of warm-up, for allocators, kernels and caches, and measured steps."""
LAST = WARM_UP + MEASURED
"""The last measured step, which ends at the start of the next one."""


def doctor(words: list[str]) -> int:
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.launch.compositions import check_composition, compose_and_run, launch_composition
    from mgpu_pipe.system.joined_world import existing_world

    command = ["mgpu-pipe", "doctor", *words]

    def job(composition: Composition) -> int:
        from mgpu_pipe.launch.micro_batch_tries import short_run
        from mgpu_pipe.launch.signals import run_begins

        run_begins()
        short = short_run(check_composition(composition, joins=True), LAST + 1, "doctor")
        composition.config = replace(short, trainer=_with_profile(short.trainer))
        leads = existing_world(os.environ).get("RANK", "0") == "0"
        if leads:
            print_line(f"measuring {MEASURED} steps of {composition.config.model.name}", file=sys.stderr, flush=True)
        with redirect_stdout(io.StringIO()):  # the run's tables are hidden
            result = launch_composition(composition, command)
        if not leads:
            return result.exit_code
        from mgpu_pipe.report.measurements import memory_of, save_step_times, show_memory
        from mgpu_pipe.report.measurements import show_step_times as show
        from mgpu_pipe.training.profiling.memory_use import MemoryUse
        from mgpu_pipe.training.profiling.rank_times import StepTimes

        measurements = save_step_times(result.folder)
        times, memory = StepTimes.read(measurements), MemoryUse.read(memory_of(measurements))
        if times is None:  # stopped or failed; the launcher printed the reason
            return result.exit_code or EXIT_FAILURE
        show(times, f"{composition.config.model.name}, {composition.config.strategy.name}")
        if memory is not None:
            show_memory(memory)
        print_line(f"picture: {RunPaths(result.folder).report}", flush=True)
        return EXIT_OK

    asks_links = words[:1] == [LINKS]
    if not asks_links and nearest(words[0] if words else "", [LINKS]):
        raise BadInputError(f"doctor {words[0]}: unknown word; did you mean {LINKS}?")
    return compose_and_run(
        "doctor [links]", DESCRIPTION, words[1:] if asks_links else words, _show_links if asks_links else job
    )


def _show_links(composition: Composition) -> int:
    from mgpu_pipe.launch.compositions import check_composition

    config = check_composition(composition)
    from mgpu_pipe.launch.measurement import measure_links
    from mgpu_pipe.report.measurements import show_links

    if table := measure_links(config):
        show_links(table, config.trainer)
    return EXIT_OK


def _with_profile(trainer: TrainerConfig) -> TrainerConfig:
    """``trainer`` with the measured steps profiled."""
    profile = "times" if trainer.profile == "none" else trainer.profile
    return replace(trainer, profile=profile, profile_steps=[WARM_UP + 1, LAST])


VERB = Verb(
    "print where the time of a step goes, and what would help", doctor, composes=True, first_words=lambda: [LINKS]
)
