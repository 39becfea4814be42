"""A sweep's folder, ``<run.root>/sweeps/<name>``: what was asked for (``sweep.json``) and a record of every point.

The records lie in an SQLite file, which several processes of one host may change at once; where the folder is on a
network file system, whose locks SQLite cannot rely on, each is a file of its own (:mod:`.file_points`).
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, NotPlainError, parse_json, read_bytes
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import BadInputError, ConfigError, print_error
from mgpu_pipe.sweep.file_points import FilePoints
from mgpu_pipe.sweep.point import INTERRUPTED, RUNNING, Point, as_record, from_record, seen

SWEEPS = "sweeps"
VERSION = 1
ASKED = "sweep.json"
DATABASE = "points.sqlite"
PAGE = "report.html"
BUSY_S = 30.0
"""How long a change waits for another process's."""
STAMP = "%Y-%m-%d_%H-%M-%S"
NETWORK = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs"),
    *("gluster", "afs", "9p", "pvfs", "orangefs", "panfs", "weka", "fuse"),
)
"""File systems, by the beginnings of their names, on which SQLite's locks may not hold."""


class Points(Protocol):
    """Where the points' records lie."""

    def all(self) -> list[dict[str, Any]]:
        """Every record, by number."""

    def add(self, records: Sequence[dict[str, Any]]) -> bool:
        """Add records, all or none; False where one of their numbers is taken."""

    def change(self, number: int, expected: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
        """Change a record if it has the ``expected`` entries; whether it had them."""


class Store:
    """A sweep that was begun; see the module.

    Raises:
        BadInputError: there is no such sweep, or its store is damaged, locked or of a newer version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = _read_asked(folder)
        self._points: Points = (
            FilePoints(folder / "points") if self.asked.get("kind") == "files" else _Database(folder / DATABASE)
        )

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, perhaps by another process, and not brought back since."""
        return bool(_read_asked(self.folder).get("cancelled"))

    def amend(self, **changes: object) -> None:
        """Change entries of what was asked for."""
        self.asked = {**_read_asked(self.folder), **changes}
        with writing(self.folder):
            replace_file(self.folder / ASKED, json.dumps(self.asked, indent=2) + "\n", flush=True)

    def points(self) -> list[Point]:
        """Every point as it is now, by number."""
        one_host = self.asked.get("kind") != "files"
        return [seen(from_record(record), one_host) for record in self._points.all()]

    def add(
        self,
        trials: Iterable[Sequence[Sequence[str]]],
        after: int | None = None,
        folders: Sequence[str] = (),
        trial: int | None = None,
    ) -> list[Point]:
        """Add points; each trial is a list of its runs' overrides.

        Args:
            after: number of the last point there is; where another process has added some since, nothing is added.
            folders: of the runs, where they are there already.
            trial: the one there is that these runs repeat with other seeds.
        """
        wanted = [list(runs) for runs in trials]
        while True:
            first = max((record["number"] for record in self._points.all()), default=0) + 1
            if after is not None and first != after + 1:
                return []
            made: list[Point] = []
            for runs in wanted:
                start = first + len(made)
                made += [Point(start + at, tuple(one), trial or start) for at, one in enumerate(runs)]
            if folders:
                made = [replace(point, folder=folder) for point, folder in zip(made, folders, strict=True)]
            with writing(self.folder):
                if self._points.add([as_record(point) for point in made]):
                    return made

    def change(self, point: Point, **changes: object) -> Point | None:
        """Change a point that is as ``point`` says, by its status and owner; None where it is not any more."""
        # a point is seen as interrupted, where the store says that a process runs it, which is gone
        status = RUNNING if point.status == INTERRUPTED and point.owner else point.status
        stored = {"status": status, "owner": point.owner, "attempts": point.attempts}
        with writing(self.folder):
            return replace(point, **changes) if self._points.change(point.number, stored, changes) else None  # type: ignore[arg-type]


def check_name(root: Path, name: str | None) -> None:
    """Refuse a name that no sweep below ``root`` can get.

    Raises:
        ConfigError: the name cannot be a folder's, or is taken.
    """
    if name is None:
        return
    if "/" in name or "\\" in name or not name.isprintable() or not name.strip() or name.startswith((".", "-")):
        raise ConfigError("sweep.name", name, "use a plain folder name, without slashes, a leading dot or dash")
    if (root / SWEEPS / name).exists():
        fix = f"continue it with mgpu-pipe sweeps resume {name}, add points with mgpu-pipe sweeps extend {name}, "
        raise ConfigError("sweep.name", name, fix + "or choose another name", "there is such a sweep already")


def create(
    root: Path,
    name: str | None,
    asked: Mapping[str, object],
    trials: Iterable[Sequence[Sequence[str]]] = (),
    folders: Sequence[str] = (),
) -> Store:
    """Begin a sweep below ``root`` (``run.root``); without a name it gets one by date and time.

    It is there with all of these points, or not at all.

    Args:
        trials, folders: as of :meth:`Store.add`.

    Raises:
        ConfigError: the name cannot be a folder's, or is taken.
        BadInputError: the folder cannot be written.
    """
    check_name(root, name)
    sweeps = (root / SWEEPS).absolute()
    with writing(sweeps):
        sweeps.mkdir(parents=True, exist_ok=True)
    wanted, number = name or time.strftime(STAMP), 1
    while True:
        folder = sweeps / (wanted if number == 1 else f"{wanted}-{number}")
        partial = sweeps / f".{folder.name}.{os.getpid()}"
        kind = "files" if on_network(sweeps) else "sqlite"
        record: dict[str, object] = {"version": VERSION, "kind": kind, "created": time.time(), **asked}
        try:
            with writing(partial):
                partial.mkdir()
                replace_file(partial / ASKED, json.dumps(record, indent=2) + "\n", flush=True)
            Store(partial).add(trials, folders=folders)
            try:
                partial.rename(folder)  # whole at once: a folder that is not empty is never replaced
                return Store(folder)
            except OSError:
                if not folder.exists():
                    raise
        finally:
            _remove(partial)
        check_name(root, name)
        number += 1


def _read_asked(folder: Path) -> dict[str, Any]:
    path = folder / ASKED
    try:
        asked = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    except FileNotFoundError:
        raise BadInputError(f"{folder}: no sweep's folder (it has no {ASKED}); see mgpu-pipe sweeps list") from None
    except (OSError, ValueError, NotPlainError) as error:
        raise BadInputError(f"{path}: cannot be read ({error}); the runs themselves lie in run.root") from error
    if not isinstance(asked, dict) or not isinstance(asked.get("version"), int):
        raise BadInputError(f"{path}: not what a sweep writes; the runs themselves lie in run.root")
    if asked["version"] > VERSION:
        raise BadInputError(f"{path}: of a newer version of mgpu_pipe ({asked['version']}); use that one")
    return asked


def find(root: Path, name: str) -> Store:
    """The sweep of that name below ``root``, or in that folder."""
    given = Path(name)
    folder = given if (given / ASKED).is_file() else root / SWEEPS / name
    if not (folder / ASKED).is_file():
        there = ", ".join(path.name for path in _folders(root)[-5:])
        fix = f"use one of {there}" if there else "none has been run yet"
        raise BadInputError(f"{name}: no such sweep below {root}; {fix} (run.root=<folder> says where)")
    return Store(folder.absolute())


def stores(root: Path) -> list[Store]:
    """The sweeps below ``root``, the newest first; one that cannot be read is told on stderr."""
    found = []
    for folder in _folders(root):
        try:
            found.append(Store(folder))
        except BadInputError as error:
            print_error(error)
    return sorted(found, key=lambda store: float(store.asked.get("created", 0.0)), reverse=True)


def _folders(root: Path) -> list[Path]:
    sweeps = root / SWEEPS
    folders = sweeps.iterdir() if sweeps.is_dir() else ()
    return sorted(path for path in folders if not path.name.startswith(".") and (path / ASKED).is_file())


def on_network(folder: Path) -> bool:
    """Whether ``folder`` lies on a file system of another machine, as the kernel names it."""
    path, kind, longest = str(folder.resolve()), "", -1
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        if len(mount) > longest and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            kind, longest = after.split()[0], len(mount)
    return kind.startswith(NETWORK)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn "cannot write here" into one line about the sweep's folder."""
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"{folder}: the sweep's folder cannot be written ({error.strerror or error}); make room, or set run.root "
            "to a folder that can be written"
        ) from error


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


class _Database:
    """Points in an SQLite file. A change is one transaction, and on the disk when it returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[dict[str, Any]]:
        with self._open() as database:
            return [json.loads(row[0]) for row in database.execute("SELECT record FROM points ORDER BY number")]

    def add(self, records: Sequence[dict[str, Any]]) -> bool:
        rows = [(record["number"], json.dumps(record)) for record in records]
        with self._open() as database:
            try:
                with database:
                    database.executemany("INSERT INTO points VALUES (?, ?)", rows)
            except sqlite3.IntegrityError:
                return False
        return True

    def change(self, number: int, expected: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
        with self._open() as database, database:
            database.execute("BEGIN IMMEDIATE")
            row = database.execute("SELECT record FROM points WHERE number = ?", (number,)).fetchone()
            record = json.loads(row[0]) if row else {}
            if any(record.get(key) != value for key, value in expected.items()) or not record:
                return False
            text = json.dumps({**record, **changes})
            database.execute("UPDATE points SET record = ? WHERE number = ?", (text, number))
        return True

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as database:
                database.execute("PRAGMA synchronous = NORMAL")
                if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'points'").fetchone():
                    database.execute("CREATE TABLE IF NOT EXISTS points (number INTEGER PRIMARY KEY, record TEXT)")
                yield database
        except sqlite3.OperationalError as error:
            raise BadInputError(
                f"{self._path}: the sweep's store cannot be used ({error}): another process holds it for long, or the "
                "disk is full or read-only; nothing of the runs is lost"
            ) from error
        except (sqlite3.DatabaseError, ValueError) as error:
            raise BadInputError(
                f"{self._path}: the sweep's store is damaged ({error}); put a copy in its place, or begin the sweep "
                "anew with checkpoint.resume=auto, which finds the runs that there are"
            ) from error
