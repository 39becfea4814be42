"""Folder of an unfinished job beside its output: what each process has answered so far, from which a rerun resumes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.system.local_files import exists, replace_file

IDENTITY, LOCK = "job.json", "lock"
SUFFIX = ".unfinished"


class JobFolder:
    """The folder of the job that writes ``output``.

    Attributes:
        root: ``<output>.unfinished``.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.root = output.with_name(output.name + SUFFIX)
        self._read: dict[Path, int] = {}
        self._rows: dict[int, bytes] = {}

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Begin the job, or resume an unfinished one; inside :meth:`locked`.

        Args:
            identity: all that decides the answers.

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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and hold its lock; a folder without answers is removed at the end.

        Raises:
            BadInputError: the output exists or cannot be written, or another command holds the lock.
        """
        if exists(self.output):
            raise BadInputError(f"--output={self.output}: exists already; move it, or give another name")
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
                if exists(self.root) and not self.answered():
                    shutil.rmtree(self.root)

    def answered(self) -> dict[int, bytes]:
        """The rows that are written so far, by line of the prompts; reads what was added since the last call."""
        for part in sorted(self.root.glob("rank-*.jsonl")):
            with part.open("rb") as file:
                file.seek(self._read.get(part, 0))
                for row in file:
                    if not row.endswith(b"\n"):  # cut off by a kill, or being written
                        break
                    self._rows[int(json.loads(row)["line"])] = row
                    self._read[part] = self._read.get(part, 0) + len(row)
        return self._rows

    @contextmanager
    def writer(self, rank: int) -> Iterator[PartWriter]:
        """The file of this rank's answers, without a row that a kill cut off."""
        path = self.root / f"rank-{rank:05d}.jsonl"
        with path.open("ab+", buffering=0) as file:
            file.seek(0)
            whole = file.read()
            file.truncate(whole.rfind(b"\n") + 1)
            yield PartWriter(file.fileno())

    def finish(self, rows: Mapping[int, bytes]) -> None:
        """Write the output in the order of the lines, and remove the folder."""
        replace_file(self.output, b"".join(rows[line] for line in sorted(rows)), flush=True)
        shutil.rmtree(self.root)


class PartWriter:
    """Appends answers to a part; what it has written survives a kill of the process.

    Args:
        fd: a descriptor open for appending.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows of a batch, each of them a line."""
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        while data:
            data = data[os.write(self._fd, data) :]
