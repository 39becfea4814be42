"""Rows of Parquet, Arrow, JSON, CSV and TSV files. Oracle: the same rows as JSON Lines; pyarrow writes binary ones."""

from __future__ import annotations

import csv
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.data_source import check_sources, open_source
from mgpu_pipe.data.parquet_rows import is_columnar, parquet_rows
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.file_source import row_of
from mgpu_pipe.errors import BadInputError, DataError
from tests.data.support import config, write_jsonl
from tests.support.fuzzing import changed

SAID = ["plain", 'a "word", and a comma', "two\nlines", "tab\there", "\u00fcber \u6f22", "=1+1", "[1, 2", '"whole"']


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def as_arrow(path: Path, rows: list[dict[str, Any]], new: Callable[..., Any]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def as_csv(path: Path, rows: list[dict[str, Any]], **form: Any) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), **form)
        writer.writeheader()
        writer.writerows(
            {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
            for row in rows
        )


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    ".parquet": as_parquet,
    ".json": lambda path, rows: path.write_text(json.dumps(rows), encoding="utf-8") and None,
    ".pretty.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2), encoding="utf-8") and None,
    ".objects.json": lambda path, rows: path.write_text("\n".join(json.dumps(row, indent=1) for row in rows)) and None,
    ".data.json": lambda path, rows: path.write_text(json.dumps({"version": 1, "data": rows})) and None,
    ".examples.json": lambda path, rows: path.write_text(json.dumps({"examples": rows}, indent=1)) and None,
    ".rows.json": lambda path, rows: (
        path.write_text('{"rows": [{\n' + ",\n".join(map(json.dumps, rows))[1:] + "\n]}") and None
    ),
    ".joined.json": lambda path, rows: path.write_text("".join(map(json.dumps, rows))) and None,
    ".commas.jsonl": lambda path, rows: path.write_text(",\n".join([*map(json.dumps, rows), ""])) and None,
    ".mac.jsonl": lambda path, rows: path.write_bytes("\r".join(map(json.dumps, rows)).encode()) and None,
    ".stream.arrow": lambda path, rows: as_arrow(path, rows, pyarrow.ipc.new_stream),
    ".file.arrow": lambda path, rows: as_arrow(path, rows, pyarrow.ipc.new_file),
    ".csv": as_csv,
    ".tsv": lambda path, rows: as_csv(path, rows, delimiter="\t"),
}
TALK = [
    [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1], **({"train": True} if at else {})}]
    for at, text in enumerate(SAID)
]
KINDS: dict[str, list[dict[str, Any]]] = {
    "jsonl": [{"id": at, "text": text} for at, text in enumerate(SAID)],
    "pairs_jsonl": [{"source": text, "target": text[::-1]} for text in SAID],
    "preferences_jsonl": [{"prompt": text, "chosen": "yes", "rejected": "no"} for text in SAID],
    "chat_jsonl": [{"id": at, "messages": talk} for at, talk in enumerate(TALK)],
}


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("source", KINDS)
def test_rows_are_the_same_in_every_form(tmp_path: Path, source: str, ending: str) -> None:
    rows = KINDS[source]
    if ending == ".tsv":  # no field of which holds a tab or two lines
        rows = [row for row in rows if not any(mark in json.dumps(row) for mark in ("two", "tab"))]
    write_jsonl(tmp_path / "a.jsonl", rows)
    WRITERS[ending](tmp_path / f"a{ending}", rows)
    found = []
    for path in (tmp_path / "a.jsonl", tmp_path / f"a{ending}"):
        run = config(tmp_path, source=source, paths=[str(path)], chat_template="plain")
        check_sources(run.model, run.data)
        opened = open_source(run, tmp_path / "cache")
        documents = list(opened.documents())
        assert sum(document.size for document in documents) <= opened.size
        found.append([(_plain(one.text), one.target, one.key) for one in documents])
    assert found[0] == found[1]


def test_a_lone_conversation_is_a_row_and_no_list_of_rows(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps(row, indent=indent))
        assert [json.loads(line) for line, *_ in row_lines(tmp_path / "a.json")] == [row]


def _plain(text: str) -> Any:
    """Without what Parquet and CSV change of a conversation's line: a number's type."""
    if not text.startswith("{"):
        return text
    return {name: value for name, value in json.loads(text).items() if name != "id"}


@pytest.mark.parametrize("ending", WRITERS)
def test_labels_are_the_same_in_every_form(tmp_path: Path, ending: str) -> None:
    rows = [{"text": f"text {at}", "label": "ab"[at % 2]} for at in range(6)]
    path = tmp_path / f"a{ending}"
    WRITERS[ending](path, rows)
    run = config(tmp_path, source="labelled_jsonl", paths=[str(path)])
    check_sources(run.model, run.data)
    read = [row_of(run.data, line, origin) for line, origin, _ in row_lines(path)]
    assert [(row.texts[0], row.label) for row in read] == [(row["text"], row["label"]) for row in rows]


def refusal(run: RunConfig, tmp_path: Path) -> str:
    with pytest.raises(BadInputError) as found:
        check_sources(run.model, run.data)
        list(open_source(run, tmp_path / "cache").documents())
    assert "\n" not in str(found.value)
    return str(found.value)


TEXTS = ["first", "second \u00fc"]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array(TEXTS, pyarrow.string_view()),
        pyarrow.array([text.encode() for text in TEXTS], pyarrow.binary()),
        pyarrow.array([text.encode() for text in TEXTS], pyarrow.binary_view()),
        pyarrow.array(TEXTS).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_texts_of_every_layout_are_read(tmp_path: Path, column: Any) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    for source in ("parquet", "jsonl"):
        run = config(tmp_path, source=source, paths=[str(path)])
        check_sources(run.model, run.data)
        assert [one.text for one in open_source(run, tmp_path / "cache").documents()] == TEXTS, source


def test_elements_of_lists_and_fields_in_them_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    turns = [[{"say": "a"}, {"say": "b"}], [{"say": "c"}]]
    pyarrow.parquet.write_table(pyarrow.table({"text": [["x", "y"], ["z"]], "turns": turns}), path)
    for column, wanted in (
        ("text", ["x", "y", "z"]),
        ("text.element", ["x", "y", "z"]),
        ("turns.say", ["a", "b", "c"]),
        ("turns.element.say", ["a", "b", "c"]),
    ):
        run = config(tmp_path, source="parquet", paths=[str(path)], text_column=column)
        assert [one.text for one in open_source(run, tmp_path / "cache").documents()] == wanted, column
    run = config(tmp_path, source="parquet", paths=[str(path)], text_column="turns.words")
    assert "set data.text_column to one that is there: turns.say" in refusal(run, tmp_path)
    run = config(tmp_path, source="parquet", paths=[str(path)], text_column="text.words")
    assert "a.parquet: has no column 'text.words'" in refusal(run, tmp_path)


def test_columns_of_one_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = [pyarrow.array(TEXTS), pyarrow.array(["other", "texts"]), pyarrow.array([1, 2])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, ["text", "text", "id"]), tmp_path / "a.parquet")
    for source in ("parquet", "jsonl"):
        run = config(tmp_path, source=source, paths=[str(tmp_path / "a.parquet")])
        assert [one.text for one in open_source(run, tmp_path / "cache").documents()] == TEXTS
        assert "several columns 'text'; the first one is read" in caplog.text
        caplog.clear()


def test_semicolons_of_a_spreadsheet_separate_columns(tmp_path: Path) -> None:
    rows = [["text", "the label"], ['one, two; "three"\nfour', "a"], ["five,six", "b"]]
    for name, separator in (("a.csv", ";"), ("b.csv", ",")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=separator).writerows(rows)
    (tmp_path / "tabs.csv").write_text('text\tlabel\n"one" and, two\ta\n')
    assert [json.loads(line) for line, *_ in row_lines(tmp_path / "tabs.csv")] == [
        {"text": '"one" and, two', "label": "a"}
    ]
    lines = [[line for line, *_ in row_lines(tmp_path / name)] for name in ("a.csv", "b.csv")]
    assert lines[0] == lines[1] and json.loads(lines[0][0]) == dict(zip(rows[0], rows[1], strict=True))


def test_a_row_with_a_wrong_number_of_fields_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,label\n"one\ntwo",a\nthree\n')
    run = config(tmp_path, source="jsonl", paths=[str(tmp_path / "a.csv")])
    assert "a.csv:4: has not as many columns as the first line" in refusal(run, tmp_path)
    (tmp_path / "b.csv").write_text('text,label\n"one,a\n')
    run = config(tmp_path, source="jsonl", paths=[str(tmp_path / "b.csv")])
    assert "b.csv:2: is not valid CSV: unexpected end of data" in refusal(run, tmp_path)


def test_a_zip_file_of_texts_is_a_document_each(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for name, text in (("x/1.txt", "one"), ("x/2.txt", "two"), ("__MACOSX/x/._1.txt", "\0")):
            file.writestr(name, text)
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "a.zip")])
    check_sources(run.model, run.data)
    assert [one.text for one in open_source(run, tmp_path / "cache").documents()] == ["one", "two"]


def _parquet_bytes() -> bytes:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), content)
    return content.getvalue()


def _zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, "text " * 99)
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUF\x03\0\0\0" + bytes(range(256)), "a GGUF file, which holds a model's weights"),
        (b"\x28\xb5\x2f\xfd\x04\xff", "a zstd file, not text; let its name end in .zst"),
        (b"\x1f\x8b\x08\0\xff\xff", "a gzip file, not text; let its name end in .gz"),
        (b"\xfd7zXZ\0\0\xff", "an xz file, not text; let its name end in .xz"),
        (_zipped("a.txt"), "a zip file, not text; let its name end in .zip"),
        (_zipped("word/document.xml"), "an Office document"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF document"),
        (b"\x89PNG\r\n\x1a\n", "a picture"),
        (pickle.dumps({"text": "\u00fc"}), "a pickle, which is never opened"),
        (_parquet_bytes(), "a Parquet file, not text; use data=parquet"),
        ("text of Windows".encode("utf-32"), "text in UTF-32, not text; convert it: iconv -f UTF-32"),
        ('{"text": "of Windows"}'.encode("utf-16-le"), "text in UTF-16, not text; convert it: iconv -f UTF-16"),
        ("text of Windows".encode("utf-16"), "text in UTF-16, not text; convert it: iconv -f UTF-16"),
        (bytes(range(256)) * 3, "a binary file"),
        (b"text\xe9text", "not UTF-8 (byte 0xe9 at offset 4); convert it, e.g. with iconv"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_files_that_are_no_text_are_named_for_what_they_are(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    found = refusal(config(tmp_path, source="text_files", paths=[str(tmp_path / "a.txt")]), tmp_path)
    assert said in found, found
    if "Parquet" not in said:
        found = refusal(config(tmp_path, source="jsonl", paths=[str(tmp_path / "a.txt")]), tmp_path)
        assert said in found, found


def test_values_that_json_has_not_do_not_end_a_run(tmp_path: Path) -> None:
    import datetime
    import decimal

    row = {"text": "a", "when": datetime.datetime(2020, 1, 1), "much": decimal.Decimal("1.5"), "none": float("nan")}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "raw": b"\xff\0"}]), tmp_path / "a.parquet")
    run = config(tmp_path, source="jsonl", paths=[str(tmp_path / "a.parquet")])
    assert [one.text for one in open_source(run, tmp_path / "cache").documents()] == ["a"]
    with pytest.raises(DataError, match="has no column"):
        list(open_source(config(tmp_path, source="pairs_jsonl", paths=run.data.paths), tmp_path / "cache").documents())


def test_spoiled_arrow_files_are_refused_in_one_line(tmp_path: Path) -> None:
    rows = [{"text": f"h\u00e4user {at} " * 9, "messages": TALK[0]} for at in range(50)]
    seeds = []
    for new in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        as_arrow(tmp_path / "a.arrow", rows, new)
        seeds.append((tmp_path / "a.arrow").read_bytes())
    path, refused = tmp_path / "a.arrow", 0
    for number in range(200):
        path.write_bytes(changed(seeds, number))
        try:
            list(row_lines(path)) if is_columnar(path) else None
        except DataError as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert refused > 20


def test_spoiled_parquet_files_are_refused_in_one_line(tmp_path: Path) -> None:
    """Among them are texts that are no UTF-8, which programs without Unicode write."""
    table = pyarrow.table({"text": [f"h\u00e4user {at} " * 9 for at in range(50)], "messages": [TALK[0]] * 50})
    seeds = []
    for compression in ("none", "zstd"):
        content = io.BytesIO()
        pyarrow.parquet.write_table(table, content, compression=compression)
        seeds.append(content.getvalue())
    path, refused = tmp_path / "a.parquet", 0
    for number in range(200):
        path.write_bytes(changed(seeds, number))
        for read in (row_lines, lambda path: parquet_rows(path, "text")):
            try:
                list(read(path))
            except DataError as error:
                refused += 1
                assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert 100 < refused < 400
    latin = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"caf\xe9"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), path)
    found = refusal(config(tmp_path, source="parquet", paths=[str(path)]), tmp_path)
    assert "a.parquet: row 1: holds a text that is not UTF-8 (unexpected end of data)" in found


def test_the_mark_that_windows_puts_before_a_text_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-8-sig"))
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "a.txt")])
    assert [one.text for one in open_source(run, tmp_path / "cache").documents()] == ["text"]
