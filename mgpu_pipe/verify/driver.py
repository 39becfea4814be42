"""``mgpu-pipe verify <any overrides>``: the parity certificate of a configuration; workers compute.

``python -m mgpu_pipe.verify.driver <folder>`` is a worker, which reads the small run's frozen configuration.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from mgpu_pipe.config.freeze import config_hash, freeze
from mgpu_pipe.config.schema import CheckpointConfig, RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, print_line, print_text
from mgpu_pipe.launch.deepspeed_build import prepare_extensions
from mgpu_pipe.launch.process_job import supervise_module
from mgpu_pipe.launch.signals import SignalInbox, StoppedBeforeTraining
from mgpu_pipe.launch.supervisor import Outcome
from mgpu_pipe.launch.worker import join_workers, limit_torch_threads
from mgpu_pipe.launch.world import run_environment
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.runs.run_folder import choose_folder
from mgpu_pipe.system.hardware import choose_threads
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import exit_now
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.certificate import Certificate, Worst, certificate, failures, show, worst_of
from mgpu_pipe.verify.shrink import shrink

MODULE = "mgpu_pipe.verify.driver"
COMPARISON = "comparison.json"
"""Rank 0's results, in the folder of the verification."""
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
    trainer, cache_dir = small.config.trainer, small.config.data.cache_dir
    prepare_extensions(small.config.strategy, trainer, cache_dir)
    variables = run_environment(trainer, cache_dir)
    named = replace(config, run=replace(config.run, name="verify"), checkpoint=CheckpointConfig())
    paths = choose_folder(named).paths
    freeze(small.config, paths.config)
    freeze(config, paths.root / CONFIGURED)
    threads = choose_threads(config.launch.threads_per_worker, dims.world_size)
    environment = describe_environment(["mgpu-pipe", "verify", *overrides], threads, dims.world_size)
    title = f"{config.model.name}, {config.strategy.name}: {dims.describe()}, {small.config.precision.name}"
    print_line(f"verifying {title}, {trainer.max_steps} steps on CPU processes", file=sys.stderr)
    for line in small.notices():
        print_line(f"note: {line}", file=sys.stderr)
    with SignalInbox() as inbox:
        try:
            processes, per_worker = dims.world_size, threads.per_worker
            outcome = supervise_module(
                MODULE, paths.root, processes=processes, threads=per_worker, inbox=inbox, variables=variables
            )
        except StoppedBeforeTraining:
            outcome = Outcome("failed", EXIT_FAILURE, 1, message=STOPPED)
        stopped = inbox.stop_requested
    if outcome.status != "finished":
        return _print_failure(outcome, stopped)
    content = json.loads((paths.root / COMPARISON).read_text(encoding="utf-8"))
    worst = [Worst.from_dict(values) for values in content["worst"]]
    result = certificate(config_hash(config), overrides, small, dims, worst, content["comparisons"], environment)
    return _conclude(result, paths.root, title)


def _print_failure(outcome: Outcome, stopped: bool) -> int:
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


def main(folder: Path) -> None:
    """Take part in the comparison; rank 0 writes its result into ``folder``."""
    with join_workers(folder) as (config, world, store):
        from mgpu_pipe.launch.process_group import process_group
        from mgpu_pipe.verify.comparison import compare

        limit_torch_threads()
        with process_group(world, store, "cpu", config.launch.collective_timeout):
            measurements = compare(config)
        if world.rank == 0:
            worst = [comparison.as_dict() for comparison in worst_of(measurements)]
            replace_file(folder / COMPARISON, json.dumps({"worst": worst, "comparisons": len(measurements)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
