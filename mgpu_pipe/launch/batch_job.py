"""``generate --input``, ``encode`` and ``score``: a batch job of this process, of processes that it starts, as a rank
of a joined world, or submitted to SLURM.

``python -m mgpu_pipe.launch.batch_job <folder>`` is a process that the command or SLURM started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread

from mgpu_pipe.config.freeze import freeze, load
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, BadInputError, MgpuError, print_error
from mgpu_pipe.import_path import allow_own_classes
from mgpu_pipe.inference.batch.settings import AnswerSettings, EncodeSettings, JobSettings, ScoreSettings
from mgpu_pipe.inference.find_model import ModelSource, find_model
from mgpu_pipe.launch.process_job import (
    SETTINGS,
    ModelShare,
    open_whole,
    opened_share,
    refuse_other_machines,
    run_processes,
)
from mgpu_pipe.launch.resume import restarts_without_progress
from mgpu_pipe.launch.worker import join_workers
from mgpu_pipe.launch.world import enter, joined_store
from mgpu_pipe.system.hardware import limit_threads
from mgpu_pipe.system.joined_world import LIFELINE_FD, existing_world
from mgpu_pipe.system.local_files import exists, replace_file
from mgpu_pipe.system.process_end import exit_now

MODULE = "mgpu_pipe.launch.batch_job"
LONGEST_WAIT_S = 30.0 * 24 * 3600
"""Seconds that a process waits for others, which may have longer texts."""


def run_job(settings: JobSettings, source: ModelSource, config: RunConfig) -> int:
    """Run the job on the configured processes.

    Args:
        config: gives processes and threads.

    Returns:
        The exit code.

    Raises:
        BadInputError: a setting is wrong, an unfinished job with other settings is there, or SLURM refuses the job.
    """
    if existing_world(os.environ):
        return _run_here(settings, source, config)
    if config.launch.type == "slurm":
        from mgpu_pipe.launch.slurm.submit_job import submit_batch_job

        settings.folder().check_output()
        folder = settings.output.with_name(settings.output.name + ".slurm")
        submit_batch_job(config, folder, settings.to_json(), MODULE)
        return EXIT_OK
    refuse_other_machines(config.trainer, config.launch)
    return _run_here(settings, source, config)


def _run_here(settings: JobSettings, source: ModelSource, config: RunConfig) -> int:
    """Run the job as a rank of the joined world, else on processes of this machine; returns the exit code."""
    folder, launch, joined = settings.folder(), config.launch, existing_world(os.environ)
    if joined:  # the ranks share the folder of the output and nothing else
        world = enter(joined, config.trainer, config.strategy, launch.threads_per_worker)
        store = joined_store(launch.collective_timeout)
        with folder.lock() if world.rank == 0 else nullcontext():
            if world.rank == 0:
                folder.begin(settings.identity(source))
            with opened_share(world, store, config, settings, LONGEST_WAIT_S) as part:
                _compute(settings, part)
        return EXIT_OK
    with folder.lock():
        folder.begin(settings.identity(source))
        processes = world_size(config.trainer, config.strategy)
        if processes == 1:
            _compute(settings, open_whole(settings, settings.device))
            return EXIT_OK
        freeze(config, RunPaths(folder.root).config)
        stopped = f"stopped; the same command resumes from {folder.root}"
        return run_processes(MODULE, folder.root, settings.to_json(), processes, launch.threads_per_worker, stopped)


def main(folder: Path) -> int:
    """Compute as a process of the job; returns the exit code."""
    if LIFELINE_FD not in os.environ:
        return _run_task(folder)
    with join_workers(folder, is_live=True) as (config, world, store):
        settings = JobSettings.from_json((folder / SETTINGS).read_text(encoding="utf-8"))
        with opened_share(world, store, config, settings, LONGEST_WAIT_S) as part:
            _compute(settings, part)
    return EXIT_OK


def _run_task(folder: Path) -> int:
    """Compute as a task of a job under SLURM; returns the exit code, 75 after SIGTERM, for which SLURM queues it again.

    SIGTERM also ends the other tasks after an error of a task; then the code is 1.
    """
    error_file, is_first = folder / "error.txt", os.environ.get("SLURM_PROCID") == "0"
    if is_first:
        error_file.unlink(missing_ok=True)

    def leave_on_sigterm() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(EXIT_FAILURE if exists(error_file) else EXIT_STOPPED)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a collective call lets no Python handler run
    Thread(target=leave_on_sigterm, daemon=True).start()
    limit_threads(os.environ)  # before torch is imported
    try:
        allow_own_classes()
        config = load(RunPaths(folder).config)
        settings = JobSettings.from_json((folder / SETTINGS).read_text(encoding="utf-8"))
        settings = replace(settings, device=device_type(config.trainer))
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) and exists(settings.output):  # ended after its last row
            return EXIT_OK
        if is_first:
            _check_progress(folder, settings.folder().count(), restarts_without_progress(config.launch))
        return _run_here(settings, find_model(settings.model), config)
    except MgpuError as error:
        print_error(error)
        replace_file(error_file, f"{error}\n")
        return error.exit_code


def _check_progress(folder: Path, rows: int, most: int) -> None:
    """Raise BadInputError for a job that SLURM queued more than ``most`` times without a row beyond ``rows``."""
    file = folder / "progress.json"
    before = json.loads(file.read_text(encoding="utf-8")) if exists(file) else {}
    restarts = before["restarts"] + 1 if before.get("rows") == rows else 0
    if restarts > most:
        file.unlink()
        key = "launch.max_restarts_without_progress"
        raise BadInputError(f"{key}={most}: the job ended {restarts} times without a further row; read its log")
    replace_file(file, json.dumps({"rows": rows, "restarts": restarts}))


def _compute(settings: JobSettings, part: ModelShare) -> None:
    """Compute this process's share of the job. A collective call if the model is cut."""
    from mgpu_pipe.inference.batch.answer import answer_prompts
    from mgpu_pipe.inference.batch.encode import encode_texts
    from mgpu_pipe.inference.batch.pair_scorer import score_rows
    from mgpu_pipe.inference.parallel_run import EncoderDecoderForward

    if isinstance(settings, EncodeSettings):
        encode_texts(settings, part.run, part.share)
    elif isinstance(settings, ScoreSettings):
        score_rows(settings, part.run, part.share)
    elif isinstance(settings, AnswerSettings):
        forward, model = part.forward, part.run.model
        if part.is_cut and model.config.is_encoder_decoder:
            forward = forward or EncoderDecoderForward(model)
        answer_prompts(settings, part.run, part.share, forward, part.is_cut)


if __name__ == "__main__":
    exit_now(main(Path(sys.argv[1])))
