"""A sweep's folder, ``<run.root>/sweeps/<name>``: its specification (``sweep.json``) and a record of every point.

The records are in an SQLite file, which several processes of one host may change at once. On a network file system,
whose locks SQLite cannot trust, each record is a file (:class:`~mgpu_pipe.sweep.point.FilePoints`).
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from mgpu_pipe.config.freeze import is_remembered, remember_bytes
from mgpu_pipe.errors import BadInputError, ConfigError, print_error
from mgpu_pipe.sweep.point import (
    INTERRUPTED,
    RUNNING,
    FilePoints,
    Point,
    as_point,
    as_record,
    check_spec,
    with_liveness,
)
from mgpu_pipe.system.local_files import (
    MAX_JSON_BYTES,
    NotPlainError,
    exists,
    is_file,
    is_folder,
    name_problem,
    parse_json,
    read_bytes,
    replace_file,
    shorten,
)

SWEEPS = "sweeps"
VERSION = 1
SPEC_FILE = "sweep.json"
DATABASE = "points.sqlite"
PAGE = "report.html"
TABLE = "CREATE TABLE points (number INTEGER PRIMARY KEY, record TEXT)"
MAX_INSTRUCTIONS = 1 << 24
"""Limit of SQLite instructions for a query or change, enough for millions of points; a cyclic page would never end."""
BUSY_S = 30.0
"""Seconds that a change waits for another process."""
STAMP = "%Y-%m-%d_%H-%M-%S"
NETWORK = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs"),
    *("gluster", "afs", "9p", "pvfs", "orangefs", "panfs", "weka", "fuse"),
)
"""Prefixes of file system types on which SQLite's locks may fail."""


class Points(Protocol):
    """Storage of the points' records."""

    def all(self) -> list[dict[str, Any]]:
        """Every record, by number."""

    def add(self, records: Sequence[dict[str, Any]]) -> bool:
        """Add all records, or none and return False if one of their numbers is taken."""

    def change(self, number: int, expected: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
        """Change a record that has the ``expected`` entries; returns whether it had them."""


class Store:
    """An existing sweep.

    Raises:
        BadInputError: no such sweep; or its store is damaged, locked or of a newer version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = _read_spec(folder)
        self._points: Points = (
            FilePoints(folder / "points") if self.spec.get("kind") == "files" else _Database(folder / DATABASE)
        )

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_foreign(self) -> bool:
        """Whether this user's cache has no record of creating this sweep."""
        return not is_remembered(_identity(self.spec))

    @property
    def cancelled(self) -> bool:
        """Whether any process cancelled the sweep and none retried it since."""
        return bool(_read_spec(self.folder).get("cancelled"))

    def amend(self, **changes: object) -> None:
        """Change entries of ``sweep.json``."""
        self.spec = {**_read_spec(self.folder), **changes}
        with writing(self.folder):
            replace_file(self.folder / SPEC_FILE, json.dumps(self.spec, indent=2) + "\n", flush=True)

    def points(self) -> list[Point]:
        """Every point by number, with its present status."""
        one_host = self.spec.get("kind") != "files"
        return [with_liveness(as_point(record, self.folder), one_host) for record in self._points.all()]

    def add(
        self,
        trials: Iterable[Sequence[Sequence[str]]],
        after: int | None = None,
        folders: Sequence[str] = (),
        trial: int | None = None,
    ) -> list[Point]:
        """Add points; each trial is a list of its runs' overrides.

        Args:
            after: number of the last point; nothing is added if another process added points since.
            folders: the runs' folders, if they exist.
            trial: existing trial that these runs repeat with other seeds.
        """
        wanted = [list(runs) for runs in trials]
        while True:
            first = max((as_point(record, self.folder).number for record in self._points.all()), default=0) + 1
            if after is not None and first != after + 1:
                return []
            new_points: list[Point] = []
            for runs in wanted:
                start = first + len(new_points)
                new_points += [
                    Point(start + offset, tuple(overrides), trial or start) for offset, overrides in enumerate(runs)
                ]
            if folders:
                new_points = [replace(point, folder=folder) for point, folder in zip(new_points, folders, strict=True)]
            with writing(self.folder):
                if self._points.add([as_record(point) for point in new_points]):
                    return new_points

    def change(self, point: Point, **changes: object) -> Point | None:
        """Change a point if its status, owner and attempts still equal ``point``'s; else None."""
        # the store has an interrupted point as running, if its process is gone
        status = RUNNING if point.status == INTERRUPTED and point.owner else point.status
        stored = {"status": status, "owner": point.owner, "attempts": point.attempts}
        with writing(self.folder):
            return replace(point, **changes) if self._points.change(point.number, stored, changes) else None  # type: ignore[arg-type]


def check_name(root: Path, name: str | None) -> None:
    """Check the name of a new sweep below ``root``; ConfigError if it is no folder's, or taken."""
    if name is None:
        return
    if "/" in name or "\\" in name or not name.isprintable() or not name.strip() or name.startswith((".", "-")):
        raise ConfigError("sweep.name", name, "use a plain folder name, without slashes, a leading dot or dash")
    if problem := name_problem(name):
        raise ConfigError("sweep.name", shorten(name), "shorten it", problem)
    if exists(root / SWEEPS / name):
        fix = f"continue it with mgpu-pipe sweeps resume {name}, add points with mgpu-pipe sweeps extend {name}, "
        raise ConfigError("sweep.name", name, fix + "or choose another name", "a sweep of this name exists")


def create(
    root: Path,
    name: str | None,
    spec: Mapping[str, object],
    trials: Iterable[Sequence[Sequence[str]]] = (),
    folders: Sequence[str] = (),
) -> Store:
    """Create a sweep below ``root`` (``run.root``), by default named by date and time.

    The sweep appears with all of these points, or not at all.

    Args:
        trials, folders: see :meth:`Store.add`.

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
        record: dict[str, object] = {"version": VERSION, "kind": kind, "created": time.time(), **spec}
        try:
            with writing(partial):
                partial.mkdir()
                replace_file(partial / SPEC_FILE, json.dumps(record, indent=2) + "\n", flush=True)
            remember_bytes(_identity(record))
            Store(partial).add(trials, folders=folders)
            try:
                partial.rename(folder)  # atomic: a folder that is not empty is never replaced
                return Store(folder)
            except OSError:
                if not exists(folder):
                    raise
        finally:
            _remove(partial)
        check_name(root, name)
        number += 1


AMENDED = ("cancelled", "seeds", "trials")
"""Entries of ``sweep.json`` that change (:meth:`Store.amend`)."""


def _identity(spec: Mapping[str, object]) -> bytes:
    """Canonical bytes of what a sweep runs and where."""
    fixed = {key: value for key, value in spec.items() if key not in AMENDED}
    return json.dumps(fixed, sort_keys=True).encode()


def _read_spec(folder: Path) -> dict[str, Any]:
    path = folder / SPEC_FILE
    try:
        spec = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    except FileNotFoundError:
        raise BadInputError(f"{folder}: no sweep's folder (it has no {SPEC_FILE}); see mgpu-pipe sweeps list") from None
    except (OSError, ValueError, NotPlainError) as error:
        raise BadInputError(f"{path}: cannot be read ({error}); the runs themselves lie in run.root") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("version"), int):
        raise BadInputError(f"{path}: not what a sweep writes; the runs themselves lie in run.root")
    if spec["version"] > VERSION:
        raise BadInputError(f"{path}: written by a newer mgpu_pipe (format {spec['version']}); update mgpu_pipe")
    check_spec(spec, path)
    return spec


def find(root: Path, name: str) -> Store:
    """The sweep named ``name`` below ``root``, or in the folder ``name``."""
    typed = Path(name)
    folder = typed if is_file(typed / SPEC_FILE) else root / SWEEPS / name
    if not is_file(folder / SPEC_FILE):
        there = ", ".join(path.name for path in _folders(root)[-5:])
        fix = f"use one of {there}" if there else "none has been run yet"
        raise BadInputError(f"{name}: no such sweep below {root}; {fix} (run.root=<folder> sets the place)")
    return Store(folder.absolute())


def stores(root: Path) -> list[Store]:
    """The sweeps below ``root``, the newest first; prints an error for each unreadable sweep."""
    sweeps = []
    for folder in _folders(root):
        try:
            sweeps.append(Store(folder))
        except BadInputError as error:
            print_error(error)
    return sorted(sweeps, key=lambda store: float(store.spec.get("created", 0.0)), reverse=True)


def _folders(root: Path) -> list[Path]:
    sweeps = root / SWEEPS
    folders = sweeps.iterdir() if is_folder(sweeps) else ()
    return sorted(path for path in folders if not path.name.startswith(".") and is_file(path / SPEC_FILE))


def on_network(folder: Path) -> bool:
    """Whether ``folder`` is on a network file system, by the kernel's name of it."""
    path, kind, longest = str(folder.resolve()), "", -1
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        if len(mount) > longest and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            kind, longest = after.split()[0], len(mount)
    return kind.startswith(NETWORK)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an OSError into a BadInputError about the sweep's folder."""
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"{folder}: the sweep's folder cannot be written ({error.strerror or error}); make room, or set run.root "
            "to a folder that can be written"
        ) from error


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _parse(text: object) -> Any:
    """Parsed JSON of a record; raises ValueError if it is none."""
    return parse_json(text if isinstance(text, str | bytes) else "", "a record")


def _is_points(database: sqlite3.Connection) -> bool:
    """Whether the table of points exists; DatabaseError for any other object, since views and triggers are programs."""
    objects = database.execute("SELECT sql FROM sqlite_master LIMIT 2").fetchall()
    if objects not in ([], [(TABLE,)]):
        raise sqlite3.DatabaseError("holds another object than the table of points")
    return bool(objects)


class _Database:
    """Points in an SQLite file. A change is one transaction and on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[dict[str, Any]]:
        with self._open() as database:
            return [_parse(row[0]) for row in database.execute("SELECT record FROM points ORDER BY number")]

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
            record = _parse(row[0]) if row else {}
            if (
                not isinstance(record, dict)
                or any(record.get(key) != value for key, value in expected.items())
                or not record
            ):
                return False
            text = json.dumps({**record, **changes})
            database.execute("UPDATE points SET record = ? WHERE number = ?", (text, number))
        return True

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as database:
                database.execute("PRAGMA synchronous = NORMAL")
                left = iter(range(MAX_INSTRUCTIONS >> 12))
                database.set_progress_handler(lambda: next(left, None) is None, 1 << 12)
                if not _is_points(database):
                    database.execute(TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
                yield database
        except sqlite3.OperationalError as error:
            if str(error) == "interrupted":
                raise BadInputError(
                    f"{self._path}: reading the sweep's store has no end; restore it from a copy"
                ) from error
            raise BadInputError(
                f"{self._path}: the sweep's store cannot be used ({error}): another process locks it for long, or the "
                "disk is full or read-only; make room, or try again (no run is lost)"
            ) from error
        except (sqlite3.DatabaseError, ValueError) as error:
            raise BadInputError(
                f"{self._path}: the sweep's store is damaged ({error}); restore it from a copy, or start the sweep "
                "again with checkpoint.resume=auto, which finds its runs"
            ) from error
