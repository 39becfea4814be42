"""Submits a run to SLURM: freezes its folder on the login node, writes its batch script and calls ``sbatch``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import LaunchConfig, RunConfig, RunOptions, TrainerConfig
from mgpu_pipe.errors import BadInputError, ConfigError, print_line, print_text
from mgpu_pipe.launch.link_channel import make_key
from mgpu_pipe.launch.node import BAD_NODES
from mgpu_pipe.launch.process_job import SETTINGS
from mgpu_pipe.launch.signals import taken_over
from mgpu_pipe.launch.slurm.script import (
    JOB_MODULE,
    POINTS,
    batch_script,
    gpus_per_node,
    job_of,
    keep_job,
    log_of,
    said,
)
from mgpu_pipe.launch.slurm.slurm_keys import SlurmConfig
from mgpu_pipe.runs import record, run_folder
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.runs.resume_command import CommandLine
from mgpu_pipe.system.local_files import expand_home, replace_file

SCRIPT = "job.sh"
"""Batch script in the run's folder; ``sbatch`` with it queues the run again."""
REFUSED = {
    "partition": ("launch.partition", "use one of those that sinfo lists"),
    "account": ("launch.account", "ask the cluster's people which account is yours"),
    "qos": ("launch.qos", "ask the cluster's people which of them you may use"),
    "reservation": ("launch.reservation", "use one of those that scontrol show reservation lists"),
    "feature": ("launch.constraint", "use features that sinfo --Format=features lists"),
    "time limit": ("launch.time", "use less, or another partition"),
    "node name": ("launch.nodelist", "use nodes that sinfo lists"),
    "gres": ("launch.gpus", "ask for GPUs that sinfo --Format=gres lists"),
    "node configuration": (
        "launch.gpus",
        "ask for what the partition's nodes have (sinfo --Format=nodes,gres,cpus,memory)",
    ),
    "node count": ("trainer.num_nodes", "use no more nodes than the partition has"),
    "more processors": ("launch.cpus", "ask for what the partition's nodes have"),
    "memory specification": ("launch.memory", "ask for what the partition's nodes have"),
}
"""Key and fix by a word of SLURM's refusal."""


@dataclass(frozen=True)
class Submitted:
    """An accepted job; ``job`` is its ID, or the array's for a sweep."""

    job: str
    folder: Path


def fit_to_nodes(config: RunConfig) -> RunConfig:
    """``config`` with ``trainer.devices`` as a number for the nodes; ConfigError if it is unknown."""
    launch, trainer = slurm_keys(config.launch), config.trainer
    if trainer.devices != "auto":
        return config
    if config.strategy.name == "single" or (trainer.accelerator == "cpu" and launch.gpus == "auto"):
        devices = 1
    elif isinstance(launch.gpus, int) and launch.gpus:
        devices = launch.gpus
    else:
        fix = "give the number of processes a node"
        raise ConfigError("trainer.devices", "auto", fix, "this machine does not know the GPUs of the job's nodes")
    return replace(config, trainer=replace(trainer, devices=devices))


def slurm_keys(launch: LaunchConfig) -> SlurmConfig:
    """``launch`` of ``launch.type=slurm``."""
    assert isinstance(launch, SlurmConfig)
    return launch


def check_commands() -> None:
    """Check that SLURM's commands are installed."""
    if shutil.which("sbatch") is None:
        fix = "submit from a login node of the cluster, or use launch=local"
        raise ConfigError("launch.type", "slurm", fix, "this machine has no sbatch")


def hand_over(config: RunConfig, command_line: CommandLine, *, dry_run: bool) -> None:
    """Submit, and print commands that follow, cancel and resume, or the script with ``dry_run``; as :func:`submit`."""
    launch = slurm_keys(config.launch)
    _note_missing_gpus(launch, config.trainer)
    if dry_run:
        run = config.run
        folder = expand_home(run.dir or f"{run.root}/{run.name}/<date>_<time>-<hash>").absolute()
        print_text(batch_script(launch, config.trainer, folder, run.name, command_line.command), end="")
        return
    done = submit(config, command_line)
    _print_commands(done)
    print_line(f"job: {done.job}")
    print_line(f"run: {done.folder}", flush=True)


def _note_missing_gpus(launch: SlurmConfig, trainer: TrainerConfig) -> None:
    if trainer.accelerator == "auto" and not gpus_per_node(launch, trainer):
        fix = "where the nodes have GPUs, give trainer.accelerator=cuda"
        print_line(f"note: trainer.accelerator=auto: the job asks for no GPUs; {fix}", file=sys.stderr)


def _print_commands(done: Submitted) -> None:
    for what, words in (
        ("follow", ["tail", "-F", log_of(done.folder, done.job)]),
        ("cancel", ["scancel", done.job]),
        ("resume", ["sbatch", done.folder / SCRIPT]),
    ):
        print_line(f"{what}: {shlex.join(map(str, words))}", file=sys.stderr)


def submit_batch_job(config: RunConfig, folder: Path, settings: str, module: str) -> None:
    """Submit a batch job with a task for each process; print its ID and the commands that follow it.

    Args:
        config: gives processes and resources.
        folder: takes the job's script, configuration, settings and logs.
        settings: text that the tasks read from :data:`SETTINGS` in ``folder``.
        module: program of a task, which takes ``folder``.

    Raises:
        BadInputError: the folder cannot be used, its job is queued, or SLURM refuses the job.
    """
    launch = replace(slurm_keys(config.launch), tasks="gpu")
    for error in launch.errors():
        raise error
    check_commands()
    config = fit_to_nodes(replace(config, launch=launch))
    _note_missing_gpus(launch, config.trainer)
    if "\\" in str(folder) or not str(folder).isprintable():
        fix = "use a folder without backslashes and control characters"
        raise BadInputError(f"{folder}: SLURM cannot write a log there; {fix}")
    refuse_queued(folder)
    is_new = not folder.exists()
    try:
        RunPaths(folder).logs.mkdir(exist_ok=True, parents=True)
        freeze(config, RunPaths(folder).config)
        replace_file(folder / SETTINGS, settings)
        command = ["mgpu-pipe", *sys.argv[1:]]
        script = write_script(launch, config.trainer, folder, folder.stem, command, module=module)
        job = sbatch(launch, config.trainer, script)
    except BaseException as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            fix = "give an output in a folder that can be written"
            raise BadInputError(f"{folder}: cannot be written ({error.strerror}); {fix}") from error
        raise
    _print_commands(Submitted(job, folder))
    print_line(f"job: {job}", flush=True)


def submit(config: RunConfig, command_line: CommandLine) -> Submitted:
    """Freeze the run's folder and submit the run.

    Args:
        config: settled and checked.

    Raises:
        BadInputError: the folder cannot be used, or SLURM refuses the job; nothing of the run is left behind.
    """
    check_commands()
    folder = run_folder.choose_folder(config, swept=command_line.swept)
    with RunLock(folder.paths.lock):
        folder = run_folder.decide_resume(folder, config.checkpoint, command_line.alone)
        paths = folder.paths
        check_folder(config.run, paths.root)
        if run_folder.is_completed(folder, config.trainer):
            limit = run_folder.limit_reached(paths)
            value = getattr(config.trainer, limit)
            raise ConfigError(f"trainer.{limit}", value, "raise it to continue", "this run is complete")
        refuse_queued(paths.root)
        folder = record.begin(folder, config, command_line.overrides, command_line.command)
        try:
            with run_folder.writing_to(paths.root):
                paths.logs.mkdir(exist_ok=True)
                (paths.root / BAD_NODES).unlink(missing_ok=True)
                make_key(paths.root)
                script = write_script(
                    slurm_keys(config.launch), config.trainer, paths.root, config.run.name, command_line.command
                )
            job = sbatch(config.launch, config.trainer, script)
        except BaseException:
            folder.discard()
            raise
    return Submitted(job, paths.root)


def check_folder(run: RunOptions, folder: Path) -> None:
    """Check that ``#SBATCH`` lines can name the folder."""
    values = {"run.dir": run.dir or "", "run.name": run.name, "run.root": str(folder)}
    for key, value in values.items():
        if "\\" in value or not value.isprintable():
            fix = "use a folder without backslashes and control characters"
            raise ConfigError(key, value, fix, "SLURM cannot write a log there")


def write_script(
    launch: SlurmConfig,
    trainer: TrainerConfig,
    folder: Path,
    name: str,
    command: Sequence[str],
    array: int = 0,
    module: str = JOB_MODULE,
) -> Path:
    """Write :func:`batch_script` into ``folder``; ConfigError if bash cannot read it because of a set-up line."""
    script = folder / SCRIPT
    script.write_text(batch_script(launch, trainer, folder, name, command, array, module), encoding="utf-8")
    script.chmod(0o755)
    read = subprocess.run(["bash", "-n", str(script)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if read.returncode:
        reason = f"bash cannot read it ({read.stderr.strip().splitlines()[0].removeprefix(f'{script}: ')})"
        raise ConfigError("launch.setup", " ".join(launch.setup), "correct its quotes", reason)
    return script


def sbatch(launch: LaunchConfig, trainer: TrainerConfig, script: Path, options: Sequence[str] = ()) -> str:
    """Submit the script and write the job's ID next to it; returns the ID. ``options`` override those of the script.

    Raises:
        ConfigError: SLURM refuses the job; names the key.
        BadInputError: SLURM cannot be reached or gives another error, or the ID cannot be written.
        KeyboardInterrupt: a stop signal arrived; the job is cancelled.
    """
    # drop the variables of an enclosing job, and those that would override the script
    dropped = {_variable(option) for option in OPTION.findall(script.read_text(encoding="utf-8"))} | UNWANTED
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and (not name.startswith("SLURM_") or name in KEPT)
    }
    stopped: list[int] = []
    before = taken_over(lambda number, frame: stopped.append(number))
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C must not end sbatch after SLURM accepted the job
        )
        job = done.stdout.strip().partition(";")[0]
        if done.returncode == 0:
            try:
                keep_job(script.parent, job)
            except OSError as error:
                cancel(job)
                raise BadInputError(
                    f"{script.parent}: cannot be written ({error.strerror}), so that job {job} was cancelled; make room"
                ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
    if stopped:
        if done.returncode == 0:
            cancel(job)
        raise KeyboardInterrupt
    if done.returncode == 0:
        return job
    raise _refusal(slurm_keys(launch), trainer, said(done))


def _refusal(launch: SlurmConfig, trainer: TrainerConfig, reason: str) -> BadInputError:
    """Error of a job that SLURM refuses for ``reason``; names the key where the words tell."""
    for word, (key, fix) in REFUSED.items():
        if word in reason.lower():
            section, name = key.split(".")
            value = getattr(launch if section == "launch" else trainer, name)
            value = gpus_per_node(launch, trainer) if key == "launch.gpus" else value
            return ConfigError(key, value, fix, f"SLURM answers: {reason}")
    return BadInputError(f"sbatch: {reason}; no job was submitted (mgpu-pipe submit --dry-run ... prints the script)")


def cancel(job: str) -> None:
    subprocess.run(["scancel", job], stdin=subprocess.DEVNULL)


OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""States of an ended job; a warned, held or suspended job is not over."""
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_EXIT_ERROR")
OPTION = re.compile(r"^#SBATCH --([\w-]+)", re.MULTILINE)
RENAMED = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE"}
UNWANTED = {"SBATCH_ARRAY_INX", "SBATCH_NO_REQUEUE", "SBATCH_WAIT"}
"""Variables that would change the kind of job."""


def _variable(option: str) -> str:
    """Variable of an sbatch option, which overrides the script's value."""
    return f"SBATCH_{RENAMED.get(option, option.upper().replace('-', '_'))}"


def refuse_queued(folder: Path) -> None:
    """Refuse a second job of a run, or a second array of a sweep."""
    job = job_of(folder)
    if not job:
        return
    queued = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if queued.returncode == 0 and set(queued.stdout.split()) - OVER:
        what = "sweep" if (folder / POINTS).exists() else "run"
        raise BadInputError(f"{folder}: this {what} is queued or running as job {job}; cancel it first: scancel {job}")
