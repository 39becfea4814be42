"""``data=sqlite``: the rows of a table. Oracle: the rows that were inserted."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.data_source import check_sources, open_source
from mgpu_pipe.errors import BadInputError, DataError

ROWS = ["b: \u00e9t\u00e9", "a", "c\nd", "a"]


def database(path: Path, rows: list[object], table: str = 'the "articles"') -> Path:
    quoted = '"' + table.replace('"', '""') + '"'
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"CREATE TABLE {quoted} (title TEXT, body)")
        file.executemany(f"INSERT INTO {quoted} VALUES ('t', ?)", [(row,) for row in rows])
        file.execute(f'CREATE INDEX IF NOT EXISTS {quoted[:-1]} index" ON {quoted} (body)')
    return path


def reads(tmp_path: Path, path: Path, *words: str) -> RunConfig:
    run = compose(["data=sqlite", f"data.paths=[{path}]", "data.text_column=body", *words])[0]
    return replace(run, data=replace(run.data, cache_dir=str(tmp_path / "cache")))


def texts(tmp_path: Path, run: RunConfig) -> list[str]:
    check_sources(run.model, run.data)
    return [document.text for document in open_source(run, tmp_path / "cache").documents()]


def test_the_rows_are_documents_in_the_order_of_the_table(tmp_path: Path) -> None:
    assert texts(tmp_path, reads(tmp_path, database(tmp_path / "a.db", list(ROWS)))) == ROWS


def test_a_table_is_named_where_there_are_several(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", ["x"])
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("CREATE TABLE other (body TEXT)")
        file.execute("INSERT INTO other VALUES ('y')")
    with pytest.raises(BadInputError, match=r"has 2 tables; set data\.table to one that is there: other, the"):
        texts(tmp_path, reads(tmp_path, path))
    assert texts(tmp_path, reads(tmp_path, path, "data.table=other")) == ["y"]


def test_the_identity_is_of_content_table_and_column(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", list(ROWS))
    first = open_source(reads(tmp_path, path), tmp_path / "cache").identity
    title = open_source(reads(tmp_path, path, "data.text_column=title"), tmp_path / "cache").identity
    database(path, ["z"], "more")
    assert len({first, title, open_source(reads(tmp_path, path), tmp_path / "cache").identity}) == 3


@pytest.mark.parametrize("value", [None, 3, b"bytes"])
def test_a_row_without_text_stops_or_is_left_out(tmp_path: Path, value: object) -> None:
    run = reads(tmp_path, database(tmp_path / "a.db", ["good", value, "last"]))
    with pytest.raises(DataError, match=r"row 2: column 'body' holds \w+, not text; correct or remove it"):
        texts(tmp_path, run)
    run.data.on_bad_sample = "skip"
    documents = list(open_source(run, tmp_path / "cache").documents())
    assert [document.text for document in documents if not document.fault] == ["good", "last"]


def test_a_text_that_is_no_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", ["good"])
    with closing(sqlite3.connect(path)) as file, file:
        file.execute('INSERT INTO "the ""articles""" VALUES (\'t\', CAST(X\'636166E9\' AS TEXT))')
    with pytest.raises(DataError, match="row 2: column 'body' is not UTF-8 at byte 3"):
        texts(tmp_path, reads(tmp_path, path))


def test_a_log_beside_the_file_is_refused(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", ["good"])
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode = WAL")
        file.execute('INSERT INTO "the ""articles""" VALUES (\'t\', \'in the log alone\')')
        file.commit()
        with pytest.raises(BadInputError, match=r"a\.db-wal holds changes that are not in it yet; close the program"):
            texts(tmp_path, reads(tmp_path, path))
    assert texts(tmp_path, reads(tmp_path, path)) == ["good", "in the log alone"]


def test_a_file_that_changes_after_it_was_hashed_is_refused(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", ["good"])
    source = open_source(reads(tmp_path, path), tmp_path / "cache")
    database(path, ["more"], "more")
    with pytest.raises(DataError, match="changed while it was being prepared"):
        list(source.documents())


@pytest.mark.parametrize(
    ("content", "words", "problem"),
    [
        (b"plain text", (), "is no SQLite file"),
        (b"SQLite format 3\0" + b"\1" * 600, (), "cannot be read as an SQLite file"),
        (None, ("data.table=absent",), "has no table 'absent'; set data.table to one that is there"),
        (
            None,
            ("data.text_column=absent",),
            "has no column 'absent'; set data.text_column to one that is there: title",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes | None, words: tuple[str, ...], problem: str
) -> None:
    path = tmp_path / "a.db"
    if content is None:
        database(path, ["good"])
    else:
        path.write_bytes(content)
    run = reads(tmp_path, path, *words)
    with pytest.raises(BadInputError, match=problem) as refused:
        check_sources(run.model, run.data)
    assert "\n" not in str(refused.value)


def test_a_transaction_that_is_not_undone_is_refused(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", ["x"])
    journal = tmp_path / "a.db-journal"
    journal.write_bytes(bytes(512))  # what PRAGMA journal_mode=PERSIST leaves
    assert texts(tmp_path, reads(tmp_path, path)) == ["x"]
    journal.write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(504))
    link = tmp_path / "link.db"
    link.symlink_to(path)
    for named in (path, link):
        with pytest.raises(BadInputError, match=r"a\.db-journal holds a transaction that is not undone; close"):
            texts(tmp_path, reads(tmp_path, named))


def test_a_virtual_table_is_none(tmp_path: Path) -> None:
    """Its program would ask the endless view for every row."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("CREATE VIEW v AS WITH RECURSIVE n(rowid) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT * FROM n")
        file.execute("CREATE VIRTUAL TABLE endless USING fts5(body, content='v')")
    with pytest.raises(BadInputError, match="has no table 'endless'"):
        texts(tmp_path, reads(tmp_path, path, "data.table=endless"))
