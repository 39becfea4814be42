"""Folder of an unfinished job next to its output: what each process has computed so far, from which a rerun resumes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.system.local_files import exists, replace_file

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
        """Begin the job, or resume an unfinished one; inside :meth:`locked`.

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
        """Refuse an output that exists.

        Raises:
            BadInputError: it does.
        """
        if exists(self.output):
            raise BadInputError(f"--output={self.output}: exists already; move it, or give another name")

    @contextmanager
    def locked(self) -> Iterator[None]:
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
        return self.answered().keys()

    def count(self) -> int:
        return len(self.answered())

    def whole_bytes(self, part: BinaryIO) -> int:
        part.seek(0)
        return part.read().rfind(b"\n") + 1

    def answered(self) -> dict[int, bytes]:
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
