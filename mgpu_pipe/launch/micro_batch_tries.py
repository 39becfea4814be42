"""Confirms ``data.micro_batch_size=max`` by short runs, each in a process that may run out of memory.

Each try trains two steps: the second one has the optimizer's state. CPU processes share the machine's memory evenly; a
limit on their data (``setrlimit(2)``, ``RLIMIT_DATA``) makes them fail where a share ends."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mgpu_pipe.checks.planned_keys import MAX, MICRO_BATCH, micro_batch_sizes, with_micro_batch
from mgpu_pipe.config.freeze import freeze, load
from mgpu_pipe.config.resolve import device_type, devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_STOPPED, ConfigError, MgpuError, print_error, print_line
from mgpu_pipe.import_path import allow_own_classes, python_module
from mgpu_pipe.launch.signals import NOT_BEGUN, SignalInbox
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.system.hardware import host_memory

UNKNOWN_LENGTH = 1_000_000
"""Schedule length in steps for a run whose length in epochs depends on its data."""


def short_run(config: RunConfig, steps: int, name: str) -> RunConfig:
    """``config`` of ``run.name=name`` and its first steps, without evaluation, checkpoints and logging."""
    trainer = replace(
        config.trainer,
        max_steps=steps,
        max_epochs=None,
        max_time=None,
        val_every_n_steps=None,
        sample_every_n_steps=None,
        progress="off",
    )
    texts = ("sample_prompts", "sample_texts")
    total = config.scheduler.total_steps or config.trainer.max_steps or UNKNOWN_LENGTH
    prompts: dict[str, Any] = {option.name: [] for option in fields(config.objective) if option.name in texts}
    return replace(
        config,
        run=replace(config.run, name=name, dir=None),
        data=replace(config.data, validation_max_samples=1),
        objective=replace(config.objective, **prompts),
        scheduler=replace(config.scheduler, total_steps=total),
        checkpoint=replace(
            config.checkpoint, every_n_steps=None, every_n_minutes=None, save_last=False, keep_best=0, resume="none"
        ),
        trainer=trainer,
        eval=replace(config.eval, tasks={}),
        logger={},
        launch=replace(config.launch, max_restarts=0),
    )


STEPS = 2
OUT_OF_MEMORY = "out of memory"
KILLED = "SIGKILL"
"""Part of the error of a rank that the kernel ended, which it does where the machine has no memory left."""
TAIL = 300


POLL_S = 1.0
"""Longest sleep between two looks at a try, whose end wakes the launcher at once."""


class MicroBatchTryError(MgpuError):
    """A try failed, but not for memory. Exit code 1."""


class MicroBatchStoppedError(MgpuError):
    """A stop signal arrived during a try, before the run began. Exit code 75."""

    exit_code = EXIT_STOPPED


def largest_micro_batch(config: RunConfig) -> RunConfig:
    """``config`` with the largest micro-batch that fits, searched from the one that it has.

    Raises:
        ConfigError: not even the smallest one fits.
        MicroBatchTryError: a try failed for another reason.
        MicroBatchStoppedError: a stop signal arrived.
    """
    sizes = micro_batch_sizes(config)
    index, fitting, failing = sizes.index(int(config.data.micro_batch_size)), -1, len(sizes)
    while fitting + 1 < failing:
        problem = _problem(with_micro_batch(config, sizes[index]))
        outcome = "does not fit" if problem else "fits"
        print_line(f"note: {MICRO_BATCH}: {sizes[index]} {outcome}", file=sys.stderr, flush=True)
        if problem:
            failing = index
        else:
            fitting = index
        # one step at a time: the first try is the predicted one
        index = fitting + 1 if fitting >= 0 else failing - 1
        if index < 0:
            fix = "use a strategy that shards, strategy.activation_checkpointing=full, or more processes or memory"
            raise ConfigError(MICRO_BATCH, MAX, fix, f"not even {sizes[0]} fits: {problem}")
    print_line(f"note: {MICRO_BATCH}: max is {sizes[fitting]}, measured", file=sys.stderr, flush=True)
    return with_micro_batch(config, sizes[fitting])


def _problem(config: RunConfig) -> str:
    """The error of a run that is out of memory, empty if it fits; raises if the run failed otherwise or stopped."""
    with (
        SignalInbox() as inbox,
        tempfile.TemporaryDirectory(prefix="micro_batch_", ignore_cleanup_errors=True) as folder,
    ):
        inbox.collect()
        tried = short_run(config, STEPS, "try")
        file, said = Path(folder) / "config.yaml", Path(folder) / "stderr"
        freeze(replace(tried, run=replace(tried.run, root=str(Path(folder) / "runs")), callbacks={}), file, flush=False)
        code = _exit_code(bind_command(python_module("mgpu_pipe.launch.micro_batch_tries", str(file))), said, inbox)
        error = said.read_text(encoding="utf-8", errors="replace")
    if inbox.stop_requested or code == EXIT_STOPPED:
        raise MicroBatchStoppedError(f"{MICRO_BATCH}=max: {NOT_BEGUN}")
    if not code:
        return ""
    errors = [line for line in error.splitlines() if line.startswith("error: ")] or [error[-TAIL:]]
    text = " ".join(errors).removeprefix("error: ")
    if OUT_OF_MEMORY in text or KILLED in text:
        return text[:TAIL]
    raise MicroBatchTryError(f"{MICRO_BATCH}=max: a try of {config.data.micro_batch_size} failed: {text}")


def _exit_code(command: Sequence[str], said: Path, inbox: SignalInbox) -> int:
    """Exit code of ``command``, which is killed when a stop signal arrives; ``said`` gets its standard error."""
    with said.open("wb") as error:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=error)
    while process.poll() is None and not inbox.stop_requested:
        inbox.wait(POLL_S)
    process.kill()
    return process.wait()


def _try(file: Path) -> int:
    """Run a frozen configuration; returns its exit code."""
    from mgpu_pipe.launch.local import launch
    from mgpu_pipe.runs.resume_command import CommandLine

    allow_own_classes()
    config = load(file)
    if device_type(config.trainer) == "cpu":
        share = host_memory() // devices_per_node(config.trainer, config.strategy)
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
