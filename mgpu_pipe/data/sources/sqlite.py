"""``data=sqlite``: the rows of a table in SQLite files, a document each, in the order of the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.fingerprint import Fingerprint, open_data
from mgpu_pipe.data.kinds import prepare_packed_text
from mgpu_pipe.data.source import DataSource
from mgpu_pipe.data.text.file_source import FileFormat, Rows, whole_document
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    import sqlite3

FILE_HEADER = b"SQLite format 3\0"


@dataclass
class SqliteConfig(DataConfig):
    table: str | None = None
    """Table whose column data.text_column is read; null: the file's only table (sqlite)."""


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens a file that nothing writes to.

    Raises:
        DataError: it is no SQLite file, or has changes in a log beside it.
    """
    import sqlite3

    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        fix = "close the program that writes it, or run PRAGMA wal_checkpoint(TRUNCATE)"
        raise DataError(f"{path}: {log.name} holds changes that are not in it yet; {fix}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = bytes  # a text that is no UTF-8 is an error of its row
            database.execute("PRAGMA trusted_schema = OFF")
            yield database
    except sqlite3.Error as error:
        raise DataError(f"{path}: cannot be read as an SQLite file: {error}; {files.REPLACE}") from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _table_of(data: DataConfig, path: Path, database: sqlite3.Connection) -> str:
    """The table that is read, which has the column.

    Raises:
        DataError: there is no such table or column.
    """
    assert isinstance(data, SqliteConfig)
    names = [
        name.decode()
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        if not name.startswith(b"sqlite_")
    ]
    table = names[0] if data.table is None and len(names) == 1 else data.table
    if table is None or table not in names:
        problem = f"has no table '{table}'" if table else f"has {len(names)} tables"
        raise DataError(f"{path}: {problem}; set data.table to one that is there: {', '.join(names) or 'none'}")
    columns = [name.decode() for _, name, *_ in database.execute(f"PRAGMA table_info({_quoted(table)})")]
    if data.text_column not in columns:
        raise files.missing_column(f"{path}: {table}", "data.text_column", data.text_column, columns)
    return table


def _rows_in(data: DataConfig, path: Path, size: int) -> Rows:
    with _database(path) as database:
        table, column = _table_of(data, path, database), _quoted(data.text_column)
        count = database.execute(f"SELECT count(*) FROM {_quoted(table)}").fetchone()[0]
        if not count:
            raise DataError(f"{path}: {table} holds no rows; remove it from the data's paths")
        # Without indices the rows come in the order of the table itself.
        rows = database.execute(f"SELECT {column}, typeof({column}) FROM {_quoted(table)} NOT INDEXED")
        for number, (value, kind) in enumerate(rows, start=1):
            yield _text(value, kind.decode(), data.text_column), f"{path}: {table}, row {number}", size // count


def _text(value: bytes, kind: str, column: str) -> str:
    if kind != "text":
        return files.BrokenRow(f"column '{column}' holds {kind}, not text; {files.FIX}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return files.BrokenRow(f"column '{column}' is not UTF-8 at byte {error.start}; {files.FIX}")


def read_table(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    with open_data(path, expected) as file:
        while file.read(1 << 20):  # reading the whole file compares it with its hashes
            pass
    yield from _rows_in(data, path, expected.size)


def check_table(data: DataConfig, path: Path, whole: bool) -> None:
    with open(path, "rb") as file:
        if file.read(len(FILE_HEADER)) != FILE_HEADER:
            raise DataError(f"{path}: is no SQLite file; {files.REPLACE}")
    line, origin, _ = next(_rows_in(data, path, 0))
    if data.on_bad_sample == "stop":
        files.whole_row(line, origin)


FORMAT = FileFormat(
    name="sqlite",
    rows=read_table,
    document=whole_document,
    check_file=check_table,
    columns=lambda data: [getattr(data, "table", None), data.text_column],
)
SOURCE = DataSource(
    name="sqlite",
    reads=(*TEXT_KEYS, "text_column"),
    keys=SqliteConfig,
    reads_files=True,
    check=FORMAT.check,
    prepare=prepare_packed_text,
    open=FORMAT.open,
)
