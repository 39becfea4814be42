"""``logs/rank-N.csv``: what each of several ranks measured of its own at every logged step. No torch here.

Ranks wait for one another in every step, so that a slow one shows in how long it waits for its data, or computes.
"""

from __future__ import annotations

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.runs.metrics_file import MetricsWriter, read_metrics, truncate_after

OWN_COLUMNS = ("step", "data_s", "cpu_s", "peak_gib")
"""Seconds that the step waited for its batch, and used the processor; peak memory as in ``metrics.csv``."""


def rank_writer(paths: RunPaths, rank: int, world_size: int, start_step: int) -> MetricsWriter | None:
    """The writer of this rank's file, None where there is one process. Rows after ``start_step`` are dropped, by rank 0
    also of ranks that an earlier attempt had.

    Raises:
        RunFolderError: the file cannot be written.
    """
    if rank == 0:
        for file in paths.logs.glob("rank-*.csv"):
            number = file.stem.removeprefix("rank-")
            if world_size == 1 or (number.isdecimal() and int(number) >= world_size):
                truncate_after(file, start_step)
    if world_size == 1:
        return None
    own = paths.rank_metrics(rank)
    own.parent.mkdir(parents=True, exist_ok=True)
    if own.exists():
        truncate_after(own, start_step)
    return MetricsWriter(own, columns=OWN_COLUMNS)


def read_ranks(paths: RunPaths, most: int) -> dict[int, dict[str, list[float]]]:
    """The columns of the first ``most`` ranks that have a file.

    Raises:
        NotPlainError: such a file is no file, or too large.
        OSError: it cannot be read.
    """
    found = ((rank, read_metrics(paths.rank_metrics(rank))) for rank in range(most))
    return {rank: columns for rank, columns in found if columns}
