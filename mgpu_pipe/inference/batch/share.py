"""The part of a batch job that a process computes: :func:`compute_batches`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

import torch.distributed as dist

from mgpu_pipe.errors import print_line
from mgpu_pipe.inference.batch.job_folder import JobFolder
from mgpu_pipe.training.progress import Progress

POLL_S = 0.2
"""Seconds between two looks at what other processes have computed."""


class Row(Protocol):
    """A row of the input, by its number in the file, from 1."""

    @property
    def line(self) -> int: ...


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Share:
    """The part of a job that this process computes.

    Attributes:
        index, shares: the batches at ``index``, ``index + shares``, ... are its own.
        writes: whether it writes them; of the processes that compute a batch together only one does.
    """

    index: int = 0
    shares: int = 1
    writes: bool = True

    @property
    def is_first(self) -> bool:
        return self.index == 0 and self.writes


def compute_batches(
    folder: JobFolder,
    share: Share,
    batches: Iterable[Sequence[AnyRow]],
    rows: int,
    compute: Callable[[Sequence[AnyRow]], Iterable[tuple[int, bytes]]],
    unit: str,
) -> float:
    """Compute this process's batches; the first process then waits for the others.

    Args:
        batches: the same in every process.
        rows: of all batches.
        compute: yields the number of each row of a batch and its record, in any order.
        unit: what a record is, in the singular.

    Returns:
        Seconds since the beginning.
    """
    done, started = frozenset(folder.numbers()), time.monotonic()
    progress = Progress(rows, unit=unit, run_name=f"{unit}s")
    if share.is_first:
        if done:
            print_line(f"note: {len(done)} of {rows} {unit}s are there already", file=sys.stderr, flush=True)
        progress.start(len(done))
    with folder.writer(share.index) if share.writes else nullcontext() as writer:
        if dist.is_initialized():
            dist.barrier()  # from here on no process needs the folder to begin
        for batch in islice(batches, share.index, None, share.shares):
            missing = {row.line for row in batch} - done
            if not missing:
                continue
            for line, record in compute(batch):
                if writer is not None and line in missing:
                    writer.write(record)
            if share.is_first:
                progress.update(folder.count())
    if share.is_first:
        while (count := folder.count()) < rows:
            progress.update(count)
            time.sleep(POLL_S)
        progress.close()
    return time.monotonic() - started
