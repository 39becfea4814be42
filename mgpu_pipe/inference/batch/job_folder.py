"""The folder of an unfinished job next to its output, and the part of the job that a process computes.

The folder holds what each process has computed so far, from which a rerun resumes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.system.local_files import exists, flush_folder, replace_file
from mgpu_pipe.training.progress import Progress

IDENTITY, LOCK = "job.json", "lock"
SUFFIX = ".unfinished"


class JobFolder(ABC):
    """The folder of the job that writes ``output``: a part of records for each process, in any order.

    Attributes:
        root: ``<output>.unfinished``.
    """

    ending: ClassVar[str]
    """Ending of the names of the parts."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.root = output.with_name(output.name + SUFFIX)

    @abstractmethod
    def numbers(self) -> Collection[int]:
        """Numbers of the rows that are computed so far."""

    @abstractmethod
    def count(self) -> int:
        """How many rows are computed so far."""

    @abstractmethod
    def whole_bytes(self, part: BinaryIO) -> int:
        """Size of the whole records of a part, without one that a kill cut off."""

    def parts(self) -> list[Path]:
        """Files of the processes."""
        return sorted(self.root.glob(f"rank-*{self.ending}"))

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Begin the job, or resume an unfinished one; inside :meth:`lock`.

        Args:
            identity: all that decides what is computed.

        Raises:
            BadInputError: the unfinished job there is another.
        """
        file = self.root / IDENTITY
        if not exists(file):
            replace_file(file, json.dumps(identity, indent=1))
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name in identity if identity[name] != before.get(name)]
        if changed:
            raise BadInputError(
                f"--output={self.output}: {self.root} holds an unfinished job with another {changed[0]} "
                f"({before.get(changed[0])}); run that again to finish it, or remove the folder"
            )

    def compare_files(self, digest: str) -> None:
        """Record the digest of the files that the input names, or compare it with that of the unfinished job.

        Raises:
            BadInputError: a file has changed since the job began.
        """
        file = self.root / IDENTITY
        identity = json.loads(file.read_text(encoding="utf-8"))
        if identity.setdefault("files", digest) != digest:
            raise BadInputError(
                f"--output={self.output}: a picture, video or recording of the input has changed since {self.root} "
                "began; restore it, or remove the folder"
            )
        replace_file(file, json.dumps(identity, indent=1))

    def check_output(self) -> None:
        """Raise BadInputError for an output that exists."""
        if exists(self.output):
            raise BadInputError(f"--output={self.output}: exists already; move it, or give another name")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and hold its lock; a folder without records is removed at the end.

        Raises:
            BadInputError: the output exists or cannot be written, or another command holds the lock.
        """
        self.check_output()
        try:
            self.root.mkdir(exist_ok=True)
        except OSError as error:
            fix = "give a name in a folder that can be written"
            raise BadInputError(f"--output={self.output}: cannot be written ({error.strerror}); {fix}") from error
        with open(self.root / LOCK, "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInputError(
                    f"--output={self.output}: another command writes it now; wait for it, or give another name"
                ) from None
            try:
                yield
            finally:
                if exists(self.root) and not self.count():
                    shutil.rmtree(self.root)

    @contextmanager
    def writer(self, rank: int) -> Iterator[PartWriter]:
        """The part of this rank, without a record that a kill cut off."""
        with (self.root / f"rank-{rank:05d}{self.ending}").open("ab+", buffering=0) as file:
            file.truncate(self.whole_bytes(file))
            yield PartWriter(file.fileno())


class LineFolder(JobFolder):
    """Records that are lines of JSON with a ``line``, their number."""

    ending = ".jsonl"

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self._read: dict[Path, int] = {}
        self._rows: dict[int, bytes] = {}

    def numbers(self) -> Collection[int]:
        return self.answers().keys()

    def count(self) -> int:
        return len(self.answers())

    def whole_bytes(self, part: BinaryIO) -> int:
        part.seek(0)
        return part.read().rfind(b"\n") + 1

    def answers(self) -> dict[int, bytes]:
        """The rows that are written so far, by line of the prompts; reads what was added since the last call."""
        for part in self.parts():
            with part.open("rb") as file:
                file.seek(self._read.get(part, 0))
                for row in file:
                    if not row.endswith(b"\n"):  # cut off by a kill, or being written
                        break
                    self._rows[int(json.loads(row)["line"])] = row
                    self._read[part] = self._read.get(part, 0) + len(row)
        return self._rows

    def finish(self, rows: Mapping[int, bytes]) -> None:
        """Write the output in the order of the lines, and remove the folder."""
        replace_file(self.output, b"".join(rows[line] for line in sorted(rows)), flush=True)
        shutil.rmtree(self.root)


class PartWriter:
    """Appends records to a part; what it has written survives a kill of the process.

    Args:
        fd: a descriptor open for appending.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]


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
        writes: whether it writes them: exactly one of the processes that compute a batch together.
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
    import torch

    done, started = frozenset(folder.numbers()), time.monotonic()
    progress = Progress(rows, unit=unit, run_name=f"{unit}s")
    if share.is_first:
        if done:
            print_line(f"note: {len(done)} of {rows} {unit}s are there already", file=sys.stderr, flush=True)
        progress.start(len(done))
    with folder.writer(share.index) if share.writes else nullcontext() as writer:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # from here on no process needs the folder to begin
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


AT_ONCE = 1 << 16
"""Vectors in memory at once."""


class VectorFolder(JobFolder):
    """Records of ``row``, int64 from 1, and ``vector``, (size,) float32.

    Args:
        size: numbers of a vector.
    """

    ending = ".bin"

    def __init__(self, output: Path, size: int) -> None:
        super().__init__(output)
        self._size = size
        self._record = np.dtype([("row", "<i8"), ("vector", "<f4", (size,))])

    def numbers(self) -> Collection[int]:
        return [int(number) for records in self._records() for number in records["row"]]

    def count(self) -> int:
        return sum(part.stat().st_size // self._record.itemsize for part in self.parts())

    def whole_bytes(self, part: BinaryIO) -> int:
        size = part.seek(0, os.SEEK_END)
        return size - size % self._record.itemsize

    def records(self, rows: list[int], vectors: NDArray[np.float32]) -> dict[int, bytes]:
        """Records by number of the row; ``vectors`` is (rows, size)."""
        records = np.empty(len(rows), self._record)
        records["row"], records["vector"] = rows, vectors
        return {row: record.tobytes() for row, record in zip(rows, records, strict=True)}

    def finish(self, rows: int) -> None:
        """Write the output in the order of the rows, and remove the folder."""
        whole = self.root / "vectors.npy"
        vectors: Any = np.lib.format.open_memmap(whole, "w+", np.dtype("<f4"), (rows, self._size))
        for records in self._records():
            vectors[records["row"] - 1] = records["vector"]
        vectors.flush()
        if self.output.suffix == ".parquet":
            whole = _write_parquet(vectors, self.root / "vectors.parquet")
        with whole.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(whole, self.output)
        flush_folder(self.output.parent)
        shutil.rmtree(self.root)

    def _records(self) -> Iterator[NDArray[Any]]:
        """All records, :data:`AT_ONCE` at a time."""
        for part in self.parts():
            with part.open("rb") as file:
                left = self.whole_bytes(file) // self._record.itemsize
                file.seek(0)
                while left:
                    records = np.fromfile(file, self._record, min(left, AT_ONCE))
                    left -= len(records)
                    yield records


def _write_parquet(vectors: NDArray[np.float32], path: Path) -> Path:
    """Write ``row``, int64 from 1, and ``vector``, a list of float32 of fixed size."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = vectors.shape[1]
    schema = pa.schema([("row", pa.int64()), ("vector", pa.list_(pa.float32(), size))])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, len(vectors), AT_ONCE):
            some = vectors[first : first + AT_ONCE]
            numbers = pa.array(np.arange(first + 1, first + 1 + len(some)))
            lists = pa.FixedSizeListArray.from_arrays(pa.array(some.ravel()), size)
            writer.write_batch(pa.record_batch([numbers, lists], schema=schema))
    return path
