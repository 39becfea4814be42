"""Confirms ``data.micro_batch_size=max`` by short runs, each in a process that may run out of memory.

Each try trains two steps: the second one has the optimizer's state. CPU processes share the machine's memory evenly; a
limit on their data (``setrlimit(2)``, ``RLIMIT_DATA``) makes them fail where a share ends.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mgpu_pipe.checks.largest_micro_batch import KEY, MAX, micro_batch_sizes, with_micro_batch
from mgpu_pipe.config.freeze import freeze, load
from mgpu_pipe.config.resolve import device_type, devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_STOPPED, ConfigError, MgpuError, print_error, print_line
from mgpu_pipe.import_path import allow_own_classes, python_module
from mgpu_pipe.launch.short_run import short_run
from mgpu_pipe.system.hardware import host_memory

STEPS = 2
OUT_OF_MEMORY = "out of memory"
KILLED = "SIGKILL"
"""Part of the error of a rank that the kernel ended, which it does where the machine has no memory left."""
TAIL = 300


class MicroBatchTryError(MgpuError):
    """A try failed, but not for memory. Exit code 1."""


def largest_micro_batch(config: RunConfig) -> RunConfig:
    """``config`` with the largest micro-batch that fits, searched from the one that it has.

    Raises:
        ConfigError: not even the smallest one fits.
        MicroBatchTryError: a try failed for another reason.
    """
    sizes = micro_batch_sizes(config)
    at, fitting, failing = sizes.index(int(config.data.micro_batch_size)), -1, len(sizes)
    while fitting + 1 < failing:
        problem = _problem(with_micro_batch(config, sizes[at]))
        print_line(f"note: {KEY}: {sizes[at]} {'does not fit' if problem else 'fits'}", file=sys.stderr, flush=True)
        if problem:
            failing = at
        else:
            fitting = at
        # one step at a time: the first try is the predicted one
        at = fitting + 1 if fitting >= 0 else failing - 1
        if at < 0:
            fix = "use a strategy that shards, strategy.activation_checkpointing=full, or more processes or memory"
            raise ConfigError(KEY, MAX, fix, f"not even {sizes[0]} fits: {problem}")
    print_line(f"note: {KEY}: max is {sizes[fitting]}, measured", file=sys.stderr, flush=True)
    return with_micro_batch(config, sizes[fitting])


def _problem(config: RunConfig) -> str:
    """The error of a run that is out of memory; empty if it fits.

    Raises:
        MicroBatchTryError: it failed for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="micro_batch_") as folder:
        tried = short_run(config, STEPS, "try")
        file = Path(folder) / "config.yaml"
        freeze(replace(tried, run=replace(tried.run, root=str(Path(folder) / "runs")), callbacks={}), file, flush=False)
        command = [*python_module("mgpu_pipe.launch.micro_batch_tries"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if not done.returncode:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or [done.stderr[-TAIL:]]
    text = " ".join(errors).removeprefix("error: ")
    if OUT_OF_MEMORY in text or KILLED in text:
        return text[:TAIL]
    if done.returncode == EXIT_STOPPED:
        raise KeyboardInterrupt
    raise MicroBatchTryError(f"{KEY}=max: a try of {config.data.micro_batch_size} failed: {text}")


def _try(file: Path) -> int:
    """Run a frozen configuration; returns its exit code."""
    from mgpu_pipe.launch.local import launch
    from mgpu_pipe.runs.resume_command import CommandLine

    allow_own_classes()
    config = load(file)
    if device_type(config) == "cpu":
        share = host_memory() // devices_per_node(config)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [size for size in (share, soft) if size != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        return launch(config, CommandLine([], [])).exit_code
    except MgpuError as error:
        print_error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_try(Path(sys.argv[1])))
