"""``mgpu-pipe verify <any overrides>``: the parity certificate of a configuration; workers compute."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig, RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, print_line, print_text
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch.deepspeed_build import prepare_extensions
from mgpu_pipe.launch.gpus import run_environment
from mgpu_pipe.launch.signals import SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.supervisor import Outcome, supervise
from mgpu_pipe.launch.workers import WorkerPlan, worker_environment
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.runs.run_folder import choose_folder
from mgpu_pipe.system.threads import choose_threads
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.certificate import Certificate, Worst, certificate, failures, show
from mgpu_pipe.verify.shrink import shrink
from mgpu_pipe.verify.verify_worker import COMPARISON

WORKER = "mgpu_pipe.verify.verify_worker"
STOP_TIMEOUT_S = 5.0
"""Short, because a verification saves nothing."""
STOPPED = "stopped by a signal before the verification ended; no certificate is written"
CONFIGURED = "configured.yaml"
"""Certified configuration; ``config.yaml`` is that of the small run, which the workers read."""


def verify(config: RunConfig, overrides: list[str]) -> int:
    """Verifies ``config`` on its topology and prints the certificate's path; runs in the main thread.

    Args:
        overrides: those of the command line, for the record.

    Returns:
        0 if every bound holds, 1 if one is broken or a process failed, 2 if a process refused the configuration.

    Raises:
        BadInputError: the configuration cannot be verified as it is.
    """
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    small = shrink(config, dims)
    prepare_extensions(small.config)
    compiled = run_environment(small.config)
    named = replace(config, run=replace(config.run, name="verify"), checkpoint=CheckpointConfig())
    paths = choose_folder(named).paths
    freeze(small.config, paths.config)
    freeze(config, paths.root / CONFIGURED)
    threads = choose_threads(config.launch.threads_per_worker, dims.world_size)
    environment = describe_environment(["mgpu-pipe", "verify", *overrides], threads, dims.world_size)
    title = f"{config.model.name}, {config.strategy.name}: {dims.describe()}, {small.config.precision.name}"
    print_line(f"verifying {title}, {small.config.trainer.max_steps} steps on CPU processes", file=sys.stderr)
    for line in small.notices():
        print_line(f"note: {line}", file=sys.stderr)
    with SignalInbox() as inbox:
        try:
            outcome = _run_workers(paths, dims.world_size, threads.per_worker, compiled, inbox)
        except StoppedBeforeTraining:
            outcome = Outcome("failed", EXIT_FAILURE, 1, message=STOPPED)
        stopped = inbox.stop_requested
    if outcome.status != "finished":
        return _failed(outcome, stopped)
    content = json.loads((paths.root / COMPARISON).read_text(encoding="utf-8"))
    worst = [Worst.from_dict(values) for values in content["worst"]]
    result = certificate(config, overrides, small, dims, worst, content["comparisons"], environment)
    return _conclude(result, paths.root, title)


def _run_workers(paths: RunPaths, world: int, threads: int, compiled: Mapping[str, str], inbox: SignalInbox) -> Outcome:
    plan = WorkerPlan(
        argv=python_module(WORKER, str(paths.root)),
        world_size=world,
        paths=paths,
        environment={**worker_environment(threads), **compiled},
    )
    return supervise(plan, inbox, stop_timeout=STOP_TIMEOUT_S)


def _failed(outcome: Outcome, stopped: bool) -> int:
    if stopped or outcome.failure is None:
        print_line(f"error: {STOPPED if stopped else outcome.message}", file=sys.stderr)
        return EXIT_FAILURE
    print_text(outcome.failure.show(), file=sys.stderr)
    return outcome.exit_code


def _conclude(result: Certificate, folder: Path, title: str) -> int:
    path = result.write(folder)
    show(result, title)
    for line in failures(result):
        print_line(f"error: {line}", file=sys.stderr)
    sys.stderr.flush()
    print_line(f"certificate: {path}", flush=True)
    return EXIT_OK if result.passed else EXIT_FAILURE
