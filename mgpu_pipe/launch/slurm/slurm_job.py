"""A task of a job's step: ``srun python -m mgpu_pipe.launch.slurm.slurm_job <run folder>``.

It reads the configuration frozen at submission and composes nothing. Exit code 75 makes the batch
script requeue the job; so does a signal that ends a task.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mgpu_pipe.errors import print_line
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.system.local_files import is_file

ANSWER_S = 10.0
"""Seconds to wait for SLURM's answer."""


def main(folder: Path, again: Sequence[str] = ()) -> int:
    """Start or resume the run in ``folder``; returns the exit code. ``again`` queues it again, by sbatch by default."""
    stop.leave_until_a_run_begins()
    from mgpu_pipe.system.hardware import limit_threads

    limit_threads(os.environ)  # before torch is imported
    from mgpu_pipe.errors import MgpuError, print_error

    try:
        return _check_and_launch(folder, again)
    except MgpuError as error:
        print_error(error)
        return error.exit_code


def _check_and_launch(folder: Path, again: Sequence[str]) -> int:
    """Check this node, its links and the configuration, then launch the run on it; returns the exit code.

    A node that cannot run the job is excluded, and the job is queued again.
    """
    from mgpu_pipe.checks.preflight import preflight
    from mgpu_pipe.config.freeze import load
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.config.resolve import device_type
    from mgpu_pipe.errors import EXIT_STOPPED, RunFolderError
    from mgpu_pipe.import_path import allow_own_classes
    from mgpu_pipe.launch.link_check import links_are_good
    from mgpu_pipe.launch.local import launch
    from mgpu_pipe.launch.node import exclude_node, node_faults
    from mgpu_pipe.launch.resume import restarts_without_progress
    from mgpu_pipe.launch.slurm.submit_job import SCRIPT
    from mgpu_pipe.runs import history
    from mgpu_pipe.runs.latest import read_record
    from mgpu_pipe.runs.resume_command import CommandLine

    paths, node = RunPaths(folder), os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if not is_file(paths.config):
        fix = "set run.root to a folder of a file system that the compute nodes share with the login node"
        raise RunFolderError(f"{folder}: node {node} does not see the run's folder; {fix}")
    first = os.environ.get("SLURM_PROCID") == "0"
    if first:
        stop.tell_before_leaving(partial(history.note_unbegun, paths, time.time()))
    allow_own_classes()
    config = load(paths.config)
    if first:
        history.check_progress(paths, restarts_without_progress(config.launch))
    config = replace(
        config, run=replace(config.run, dir=str(folder)), checkpoint=replace(config.checkpoint, resume="auto")
    )
    if faults := node_faults(config.trainer, config.strategy, folder, node):
        exclude_node(folder, node, faults)
        print_line(f"error: node {node}: {'; '.join(faults)}; the job is queued again without it", file=sys.stderr)
        return EXIT_STOPPED
    if not links_are_good(folder, node, device_type(config.trainer), config.launch.collective_timeout):
        return EXIT_STOPPED
    preflight(config)
    if first:  # a stop requested by one rank stops every rank
        export_time_limit(this_job())
    command = read_record(folder).get("command")
    command_line = CommandLine(
        overrides=paths.overrides.read_text(encoding="utf-8").splitlines(),
        command=[str(word) for word in command] if isinstance(command, list) else [],
        again=again or ["sbatch", str(folder / SCRIPT)],
    )
    return launch(config, command_line).exit_code


def this_job() -> str:
    """ID of this job for SLURM's commands: in an array ``<array>_<index>``."""
    array, place = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{place}" if array else os.environ["SLURM_JOB_ID"]


def export_time_limit(job: str) -> None:
    """Set the variable with the end of the job's time limit, for this process and its workers."""
    from mgpu_pipe.errors import BadInputError
    from mgpu_pipe.launch.slurm.script import ask, seconds
    from mgpu_pipe.training.run_clock import JOB_ENDS

    try:
        left = seconds(ask(["squeue", "--noheader", f"--jobs={job}", "--format=%L"], timeout_s=ANSWER_S).strip())
    except BadInputError as error:
        print_line(f"note: {error}; a save that takes longer than launch.warning_s may be too late", file=sys.stderr)
        return
    if not math.isnan(left):
        os.environ[JOB_ENDS] = str(time.time() + left)


if __name__ == "__main__":
    from mgpu_pipe.system.process_end import exit_now

    exit_now(main(Path(sys.argv[1])))
