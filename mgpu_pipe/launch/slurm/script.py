"""Batch script of a job: options for SLURM, set-up lines and one step."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.import_path import other_python_module, python_module
from mgpu_pipe.launch.slurm.slurm_keys import SlurmConfig
from mgpu_pipe.system.local_files import replace_file

JOB_FILE = "slurm.json"
"""File in the folder of a run or a sweep with its latest job."""
POINTS = "points.txt"
"""File in a sweep's folder with the run folders of its array, one per line."""


def keep_job(folder: Path, job: str) -> None:
    """Record the job that ``folder`` was submitted as."""
    replace_file(folder / JOB_FILE, json.dumps({"job": job, "submitted": time.time()}) + "\n")


def job_of(folder: Path) -> str:
    """ID of the latest job of a run or a sweep; empty if it was never submitted."""
    try:
        return str(json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def log_of(folder: Path, job: str) -> Path:
    """File with the output of the tasks of a run's job."""
    return RunPaths(folder).logs / f"slurm-{job}.log"


def ask(command: Sequence[str], timeout_s: float | None = None) -> str:
    """Output of a SLURM command; BadInputError if it is missing, refuses, or does not answer in time."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BadInputError(f"{shlex.join(command)}: no answer within {timeout_s:g} s") from None
    except FileNotFoundError:
        raise BadInputError(f"{command[0]}: is not on this machine; use a login node of the cluster") from None
    if done.returncode:
        raise BadInputError(f"{shlex.join(command)}: {said(done)}")
    return done.stdout


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Reason why a SLURM command failed, on one line."""
    lines = [line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines()]
    return " ".join(lines) or f"exit code {done.returncode}"


def seconds(text: str) -> float:
    """Seconds of a SLURM time ``[days-][[hours:]minutes:]seconds``; NaN for ``UNLIMITED`` and similar."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]):
        return math.nan
    return 86400.0 * int(days or 0) + sum(int(part) * 60**power for power, part in enumerate(reversed(parts)))


JOB_MODULE, POINT_MODULE = "mgpu_pipe.launch.slurm.slurm_job", "mgpu_pipe.sweep.slurm_point"
"""Modules of a task: a run, or a point of a sweep, which also updates the sweep's store."""
WARNING = "USR1"
"""Warning signal to the tasks of the step, which save and end; the shell (``B:``) does not get it."""
AFTER = """\
code=$?
# 75: stopped after saving, or worth another try; above 128: ended by a signal
if [ $code -eq 75 ] || [ $code -gt 128 ]; then
    trap '' TERM  # the shell outlives its job for a moment
    if ! scontrol requeue "{job}"; then
        echo "error: SLURM does not requeue this job; resume with: {again}" >&2
    elif [ -s "$run/bad_nodes.txt" ]; then  # nodes that failed the check before the start
        nodes=$(cut -d' ' -f1 "$run/bad_nodes.txt" | paste -sd,)
        scontrol update JobId="{job}" ExcNodeList="$nodes"{exclude}
    fi
fi
exit $code"""


def batch_script(
    launch: SlurmConfig,
    trainer: TrainerConfig,
    folder: Path,
    name: str,
    submitted: Sequence[str],
    array: int = 0,
    module: str = JOB_MODULE,
) -> str:
    """Text of the batch script for ``sbatch``.

    Args:
        launch, trainer: keys of the run, or of any point of the sweep, which all request the same; ``devices`` is a
            number.
        folder: the run's folder; for an array, the folder with ``points.txt``.
        name: name of the job.
        submitted: the user's command, for readers of the script.
        array: number of points of the sweep; 0 for one run. An array's last job has the ID of the whole array, so jobs
            of points are addressed by their index.
        module: program of a task, which takes the folder.
    """
    options = [*_sbatch_options(launch, trainer, folder, name, array), *launch.sbatch]
    python = launch.python or ("python3" if launch.container else "")
    sweep = shlex.quote(str(folder))
    run = f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(folder / POINTS))})'
    words = {
        "{job}": "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID",
        "{again}": "sbatch --array=$SLURM_ARRAY_TASK_ID $sweep/job.sh" if array else "sbatch $run/job.sh",
        "{exclude}": shlex.quote(f",{launch.exclude}") if launch.exclude else "",
    }
    module, arguments = (POINT_MODULE, '"$run" "$sweep"') if array else (module, '"$run"')
    task = shlex.join(other_python_module(python, module) if python else python_module(module))
    after = AFTER
    for word, text in words.items():
        after = after.replace(word, text)
    step = ["srun", *_step_options(launch, trainer, folder), *launch.srun]
    inside = _container(launch, folder)
    lines = [
        "#!/bin/bash",
        f"# {' '.join(shlex.join(submitted).splitlines())}",
        *(f"#SBATCH {option}" for option in options),
        "",
        *launch.setup,
        *([f"sweep={sweep}", run] if array else [f"run={sweep}"]),
        f"{shlex.join(step)} {inside}{task} {arguments}",
        *after.splitlines(),
        "",
    ]
    return "\n".join(lines)


def _sbatch_options(launch: SlurmConfig, trainer: TrainerConfig, folder: Path, name: str, array: int) -> list[str]:
    """Options of sbatch, with quotes around spaces."""
    devices = int(trainer.devices)
    tasks = 1 if launch.tasks == "node" else devices
    cpus = None if launch.cpus is None else launch.cpus * devices // tasks
    gpus = gpus_per_node(launch, trainer)
    log = f"{str(folder).replace('%', '%%')}/logs/slurm-{'%A_%a' if array else '%j'}.log"
    values = {
        "job-name": name,
        "output": log,
        "open-mode": "append",
        "nodes": trainer.num_nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus,
        "gpus-per-node": (f"{launch.gpu_type}:{gpus}" if launch.gpu_type else gpus) or None,
        "mem": "0" if launch.memory == "all" else launch.memory,
        "time": launch.whole_time(),
        "signal": f"{WARNING}@{launch.warning_s}",
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "constraint": launch.constraint,
        "nodelist": launch.nodelist,
        "exclude": launch.exclude,
        "reservation": launch.reservation,
        "comment": str(folder),
        "array": f"0-{array - 1}{f'%{launch.array_limit}' if launch.array_limit else ''}" if array else None,
    }
    flags = ["--requeue", *(["--exclusive"] if launch.exclusive else [])]
    return [*(f"--{key}={shlex.quote(str(value))}" for key, value in values.items() if value is not None), *flags]


def gpus_per_node(launch: SlurmConfig, trainer: TrainerConfig) -> int:
    """GPUs per node that the job requests."""
    if launch.gpus != "auto":
        return launch.gpus
    return int(trainer.devices) if trainer.accelerator in ("cuda", "gpu") else 0


def _step_options(launch: SlurmConfig, trainer: TrainerConfig, folder: Path) -> list[str]:
    """Options of srun, which ignores the script's cpus-per-task since SLURM 22.05."""
    options = ["--kill-on-bad-exit=1"]
    if launch.cpus is not None:
        devices = int(trainer.devices)
        options.append(f"--cpus-per-task={launch.cpus * (devices if launch.tasks == 'node' else 1)}")
    if launch.container and launch.container_by == "pyxis":
        options += [f"--container-image={launch.container}", "--container-workdir=" + str(Path.cwd())]
        options.append("--container-mounts=" + ",".join(_mounts(launch, folder)))
    return options


def _container(launch: SlurmConfig, folder: Path) -> str:
    """Command before the interpreter that enters the container; empty if there is none or srun enters it."""
    if not launch.container or launch.container_by == "pyxis":
        return ""
    binds = [f"--bind={mount}" for mount in _mounts(launch, folder)]
    return shlex.join(["apptainer", "exec", "--nv", *binds, launch.container]) + " "


def _mounts(launch: SlurmConfig, folder: Path) -> list[str]:
    return [*(f"{path}:{path}" for path in (Path.cwd(), folder)), *launch.container_mounts]
