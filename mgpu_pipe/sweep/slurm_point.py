"""A task of a job in a sweep's array: ``srun python -m mgpu_pipe.sweep.slurm_point <run folder> <sweep's folder>``.

Runs :mod:`mgpu_pipe.launch.slurm.slurm_job`; the first task also records the run's start and end in the sweep's store.
A killed job leaves a point without a living owner, which counts as interrupted until the job starts again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mgpu_pipe.errors import print_line
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.launch.slurm import slurm_job


def main(folder: Path, sweep: Path) -> int:
    """Start or resume the run in ``folder``; returns the exit code."""
    stop.leave_until_a_run_begins()
    again = ["sbatch", f"--array={os.environ['SLURM_ARRAY_TASK_ID']}", str(sweep / "job.sh")]
    if os.environ.get("SLURM_PROCID") != "0":
        return slurm_job.main(folder, again)
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.errors import EXIT_BAD_INPUT, EXIT_OK, BadInputError, print_error
    from mgpu_pipe.runs.lock import is_held
    from mgpu_pipe.sweep.point import CANCELLED, RUNNING
    from mgpu_pipe.sweep.run_points import take
    from mgpu_pipe.sweep.store import Store
    from mgpu_pipe.sweep.sweep_outcome import record_outcome

    try:
        store = Store(sweep)
        point = next(point for point in store.points() if point.folder == str(folder))
        if point.status == CANCELLED:
            print_line(
                f"run {point.number} was cancelled; mgpu-pipe sweeps retry {sweep} brings it back", file=sys.stderr
            )
            return EXIT_OK
        seen, point = point, take(store, point) or point
    except BadInputError as error:
        print_error(error)
        return error.exit_code
    began = time.monotonic()
    code = slurm_job.main(folder, again)
    if code == EXIT_BAD_INPUT and seen.status == RUNNING and is_held(RunPaths(folder).lock):
        # another job is running this point
        store.change(point, owner=seen.owner, attempts=seen.attempts, begun=seen.begun)
        return code
    record_outcome(store, point, code, time.monotonic() - began)
    return code


if __name__ == "__main__":
    from mgpu_pipe.system.process_end import exit_now

    exit_now(main(Path(sys.argv[1]), Path(sys.argv[2])))
