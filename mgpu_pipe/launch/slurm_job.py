"""``python -m mgpu_pipe.launch.slurm_job``: the old name of a job's program, for jobs queued under it."""

import sys
from pathlib import Path

if __name__ == "__main__":
    from mgpu_pipe.launch.slurm.slurm_job import main
    from mgpu_pipe.system.process_end import exit_now

    exit_now(main(Path(sys.argv[1])))
