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
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, open_data
from mgpu_pipe.data.text.file_source import FileFormat, Rows, whole_document
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    import sqlite3

FILE_HEADER = b"SQLite format 3\0"
JOURNAL_HEADER = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
"""First bytes of a rollback journal that is not undone (sqlite.org/fileformat2.html, section 3)."""


TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 ORDER BY name"
"""Tables whose rows the file holds. A virtual table has no page, and its program could run for ever."""


@dataclass
class SqliteConfig(DataConfig):
    table: str | None = None
    """Table whose column data.text_column is read; null: the file's only table (sqlite)."""


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens an SQLite file that nothing writes to; DataError if a log or journal next to it holds changes."""
    import sqlite3

    real = path.resolve()  # SQLite opens log and journal next to the file that a link names
    log, journal = (real.with_name(f"{real.name}-{end}") for end in ("wal", "journal"))
    if log.is_file() and log.stat().st_size:
        fix = "close the program that writes it, or run PRAGMA wal_checkpoint(TRUNCATE)"
        raise DataError(f"{path}: {log.name} holds changes that are not in it yet; {fix}")
    if journal.is_file():
        with open(journal, "rb") as file:
            if file.read(len(JOURNAL_HEADER)) == JOURNAL_HEADER:
                fix = "close the program that writes it, or open it once with sqlite3"
                raise DataError(f"{path}: {journal.name} holds a transaction that is not undone; {fix}")
    try:
        with closing(sqlite3.connect(f"{real.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = bytes  # a text that is no UTF-8 is an error of its row
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA cell_size_check = ON")
            yield database
    except sqlite3.Error as error:
        raise DataError(f"{path}: cannot be read as an SQLite file: {error}; {files.REPLACE}") from error


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _table_of(data: DataConfig, path: Path, database: sqlite3.Connection) -> str:
    """The table to read, which has the column; DataError without it."""
    assert isinstance(data, SqliteConfig)
    names = [name.decode(errors="replace") for (name,) in database.execute(TABLES) if not name.startswith(b"sqlite_")]
    table = names[0] if data.table is None and len(names) == 1 else data.table
    if table is None or table not in names:
        problem = f"has no table '{table}'" if table else f"has {len(names)} tables"
        raise DataError(f"{path}: {problem}; set data.table to one that is there: {', '.join(names) or 'none'}")
    columns = [name.decode(errors="replace") for _, name, *_ in database.execute(f"PRAGMA table_info({_quote(table)})")]
    if data.text_column not in columns:
        raise files.missing_column(f"{path}: {table}", "data.text_column", data.text_column, columns)
    return table


def _rows_in(data: DataConfig, path: Path, size: int) -> Rows:
    with _database(path) as database:
        table, column = _table_of(data, path, database), _quote(data.text_column)
        # Without indices the rows come in the order of the table itself.
        text = f"CASE typeof({column}) WHEN 'text' THEN {column} END"
        rows = database.execute(f"SELECT {text}, typeof({column}) FROM {_quote(table)} NOT INDEXED")
        number, most = 0, path.stat().st_size
        for number, (value, kind) in enumerate(rows, start=1):
            if number > most:  # a row takes a byte at least; pages that name each other have no end
                raise DataError(f"{path}: {table} has more rows than the file has bytes; {files.REPLACE}")
            yield (
                _text(value, kind.decode(), data.text_column),
                f"{path}: {table}, row {number}",
                size if number == 1 else 0,
            )
        if not number:
            raise DataError(f"{path}: {table} holds no rows; remove it from the data's paths")


def _text(value: bytes, kind: str, column: str) -> str:
    if kind != "text":
        return files.BrokenRow(f"column '{column}' holds {kind}, not text; {files.FIX}")
    if len(value) > files.LONGEST_LINE:
        return files.BrokenRow(f"column '{column}' holds {len(value):,} bytes, too many for a row; {files.FIX}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return files.BrokenRow(f"column '{column}' is not UTF-8 at byte {error.start}; {files.FIX}")


def read_table(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    before = path.stat()
    with open_data(path, expected) as file:
        while file.read(1 << 20):  # reading the whole file compares it with its hashes
            pass
    yield from _rows_in(data, path, expected.size)
    after = path.stat()
    if (before.st_mtime_ns, before.st_size, before.st_ino) != (after.st_mtime_ns, after.st_size, after.st_ino):
        raise ChangedFileError(path)


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
SOURCE = FORMAT.source(reads=(*TEXT_KEYS, "text_column"), keys=SqliteConfig)
