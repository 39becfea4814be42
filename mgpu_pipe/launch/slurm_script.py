"""The batch script of a job: what is asked of SLURM, the set-up lines, one step. No torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.resolve import devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.launch.slurm_keys import SlurmConfig
from mgpu_pipe.launch.slurm_submitted import POINTS

JOB, POINT_JOB = "mgpu_pipe.launch.slurm_job", "mgpu_pipe.sweep.slurm_point"
"""What a task runs: a run, or a point of a sweep, which the sweep's store hears of."""
WARNING = "USR1"
"""The warning goes to the tasks of the step, not to the shell (``B:`` would mean that): they save and end."""
AFTER = """\
code=$?
# 75: stopped after saving, or worth another try; above 128: ended by a signal
if [ $code -eq 75 ] || [ $code -gt 128 ]; then
    trap '' TERM  # the shell outlives its job for a moment
    if ! scontrol requeue "{job}"; then
        echo "error: SLURM does not requeue this job; go on with: {again}" >&2
    elif [ -s "$run/bad_nodes.txt" ]; then  # nodes that failed the check before the start
        nodes=$(cut -d' ' -f1 "$run/bad_nodes.txt" | paste -sd,)
        scontrol update JobId="{job}" ExcNodeList="$nodes{exclude}"
    fi
fi
exit $code"""


def batch_script(config: RunConfig, folder: Path, name: str, submitted: Sequence[str], array: int = 0) -> str:
    """The text that ``sbatch`` gets.

    Args:
        config: the run's, or that of a point of the sweep, which all ask the same of the cluster; ``launch`` is a
            :class:`~mgpu_pipe.launch.slurm_keys.SlurmConfig`, and ``trainer.devices`` a number.
        folder: the run's; of an array, the one whose file ``points.txt`` names the run folders, a line each.
        name: of the job.
        submitted: the command that made it, for the reader.
        array: points of the sweep; 0 is one run. The number of an array's last job is the array's own, which stands
            for all of its jobs, so that a point's job is called by its place.
    """
    launch = config.launch
    assert isinstance(launch, SlurmConfig)
    options = [*_wanted(config, launch, folder, name, array), *launch.sbatch]
    python = shlex.quote(launch.python or ("python3" if launch.container else sys.executable))
    sweep = shlex.quote(str(folder))
    run = f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(folder / POINTS))})'
    words = {
        "{job}": "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID",
        "{again}": "sbatch --array=$SLURM_ARRAY_TASK_ID $sweep/job.sh" if array else "sbatch $run/job.sh",
        "{exclude}": f",{launch.exclude}" if launch.exclude else "",
    }
    task = f'{POINT_JOB} "$run" "$sweep"' if array else f'{JOB} "$run"'
    after = AFTER
    for word, text in words.items():
        after = after.replace(word, text)
    step = ["srun", *_step_options(config, launch, folder), *launch.srun]
    inside = _container(launch, folder)
    lines = [
        "#!/bin/bash",
        f"# {' '.join(shlex.join(submitted).splitlines())}",
        *(f"#SBATCH {option}" for option in options),
        "",
        *launch.setup,
        *([f"sweep={sweep}", run] if array else [f"run={sweep}"]),
        f"{shlex.join(step)} {inside}{python} -m {task}",
        *after.splitlines(),
        "",
    ]
    return "\n".join(lines)


def _wanted(config: RunConfig, launch: SlurmConfig, folder: Path, name: str, array: int) -> list[str]:
    """The options of sbatch, each as its parser reads it: quotes keep spaces together."""
    devices = devices_per_node(config)
    tasks = 1 if launch.tasks == "node" else devices
    cpus = None if launch.cpus is None else launch.cpus * devices // tasks
    gpus = gpus_per_node(config, launch)
    log = f"{str(folder).replace('%', '%%')}/logs/slurm-{'%A_%a' if array else '%j'}.log"
    values = {
        "job-name": name,
        "output": log,
        "open-mode": "append",
        "nodes": config.trainer.num_nodes,
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


def gpus_per_node(config: RunConfig, launch: SlurmConfig) -> int:
    """GPUs that the job asks for on each node."""
    if launch.gpus != "auto":
        return launch.gpus
    return devices_per_node(config) if config.trainer.accelerator in ("cuda", "gpu") else 0


def _step_options(config: RunConfig, launch: SlurmConfig, folder: Path) -> list[str]:
    """Of srun, which does not take cpus-per-task over from the script (since SLURM 22.05)."""
    options = ["--kill-on-bad-exit=1"]
    if launch.cpus is not None:
        devices = devices_per_node(config)
        options.append(f"--cpus-per-task={launch.cpus * (devices if launch.tasks == 'node' else 1)}")
    if launch.container and launch.container_by == "pyxis":
        options += [f"--container-image={launch.container}", "--container-workdir=" + str(Path.cwd())]
        options.append("--container-mounts=" + ",".join(_mounts(launch, folder)))
    return options


def _container(launch: SlurmConfig, folder: Path) -> str:
    """What stands before the interpreter; nothing without a container, and where srun itself enters it."""
    if not launch.container or launch.container_by == "pyxis":
        return ""
    binds = [f"--bind={mount}" for mount in _mounts(launch, folder)]
    return shlex.join(["apptainer", "exec", "--nv", *binds, launch.container]) + " "


def _mounts(launch: SlurmConfig, folder: Path) -> list[str]:
    return [*(f"{path}:{path}" for path in (Path.cwd(), folder)), *launch.container_mounts]
