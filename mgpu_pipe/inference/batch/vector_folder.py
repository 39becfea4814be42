"""Folder of an unfinished job that encodes texts: records of a row's number and its vector."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.inference.batch.job_folder import JobFolder
from mgpu_pipe.system.local_files import flush_folder

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
