"""Rows of tables: JSON Lines, one JSON list, CSV, TSV, Parquet or Arrow.

Each row becomes a line of JSON that :func:`mgpu_pipe.data.files.json_row` reads. A file with the first bytes of Parquet
or Arrow is that; the suffixes ``.csv`` and ``.tsv`` name separated files; all else is JSON. The list of a JSON file may
be a field of its only object. Objects of a JSON file may stand in one line, or end with commas.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote, unquote_to_bytes

from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.compressed import bytes_read, codec_of, open_text, table_suffix
from mgpu_pipe.data.fingerprint import Fingerprint, check_readable
from mgpu_pipe.data.parquet_rows import is_columnar, parquet_lines
from mgpu_pipe.errors import DataError

Keep = Callable[[bytes], str]
"""Function from a file's content to the name of a file with this content."""
EMBEDDED = "embedded-"
"""Prefix of the names of such files."""
_URI = re.compile(r"data:[^,]{0,200},", re.IGNORECASE)
_FILE_URI = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)


def keep_in(cache: Path) -> Keep:
    """Builds a :data:`Keep` that writes files to the cache, each content once."""

    def keep(content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        file = cache / "embedded" / digest[:2] / f"{EMBEDDED}{digest}"
        if not file.is_file() or file.stat().st_size != len(content):
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=file.parent)
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)
            os.replace(partial, file)
        return str(file)

    return keep


def keep_nothing(table: Path) -> Keep:
    """Builds a :data:`Keep` for checks that writes nothing: the table stands for every file in it."""
    return lambda content: str(table)


def find_file(value: object, keep: Keep) -> object:
    """Name of the file that a value holds or names, or the value; BadSampleError for a broken ``data:`` URI."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and (scheme := _FILE_URI.match(value)):
        return unquote(value[scheme.end() :])
    if not isinstance(value, str) or not (head := _URI.match(value)):
        return value
    content = value[head.end() :]
    if not head[0].lower().endswith(";base64,"):
        return keep(unquote_to_bytes(content))
    try:
        return keep(base64.b64decode("".join(content.split()), validate=True))
    except ValueError as error:
        raise BadSampleError(f"has a data: URI that cannot be read ({error})") from error


def is_embedded(path: Path) -> bool:
    """Whether :func:`keep_in` wrote the file, so that its name means nothing to the user."""
    return path.name.startswith(EMBEDDED)


RowLines = Iterator[tuple[str, str, int]]
"""For each row: its line of JSON, its origin, and its share of the file's bytes."""
LOOKED_AT = 1000
"""Rows of a table that a check reads; they may embed files."""
csv.field_size_limit(files.LONGEST_LINE)


def row_lines(
    path: Path,
    expected: Fingerprint | None = None,
    keep: Mapping[str, Callable[[bytes], str]] | None = None,
    nested: bool = False,
) -> RowLines:
    """Yields the rows of a file. A broken row is a line that ``json_row`` refuses.

    Args:
        keep: see :func:`mgpu_pipe.data.parquet_rows.parquet_lines`.
        nested: parse a CSV field that is a JSON list, such as messages.

    Raises:
        DataError: the file cannot be read, is not ``expected``, or holds no rows.
    """
    if codec_of(path) is None and is_columnar(path):
        return parquet_lines(path, expected, keep)
    if suffix := table_suffix(path):
        return _separated_rows(path, expected, suffix == ".tsv", nested)
    return _json_rows(path, expected)


_LISTS = ("data", "rows", "examples", "conversations")
"""Fields of a JSON file's only object that may hold its rows."""
_LIST_START = re.compile(rf'\{{.*"(?:{"|".join(_LISTS)})"\s*:\s*\[')


def _json_rows(path: Path, expected: Fingerprint | None) -> RowLines:
    """Yields the rows of JSON Lines, of a JSON list, of objects one after another, or of the only object's list."""
    lines = files.read_lines(path, expected)
    first, second = next(lines), next(lines, None)
    start = first[0].strip()
    opened = _LIST_START.match(start)
    is_list = start.startswith("[") and not (second is not None and _is_list(start) and second[0].lstrip()[:1] == "[")
    is_whole = is_list or start == "{" or (opened and (second is None or start[opened.end() :] in "{"))
    if not is_whole and not _is_joined(start):
        yield first
        yield from () if second is None else (second, *lines)
        return
    yield from _rows_of_whole_json(path, expected)


def _rows_of_whole_json(path: Path, expected: Fingerprint | None) -> RowLines:
    """Yields the rows of a JSON file that is no JSON Lines; its whole text is in memory."""
    text = files.decode(files.read_bytes(path, expected), str(path)).removeprefix("\ufeff")
    size, decoder = check_readable(path), json.JSONDecoder(parse_constant=files.refuse_constant)
    offset, number, listed = _past(text, 0, " \t\r\n"), 0, text.lstrip()[:1] == "["
    offset, before = offset + listed, 0
    while (offset := _past(text, offset, " \t\r\n,")) < len(text) and not (listed and text[offset] == "]"):
        number += 1
        origin = f"{path}: row {number}"
        try:
            value, end = decoder.raw_decode(text, offset)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin}: is not valid JSON: {error.msg} (line {error.lineno}, character {error.colno}); {files.FIX}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin}: is not valid JSON: {error}; {files.FIX}") from error
        done = size * end // len(text)
        if number == 1 and not listed and not text[end:].strip() and (rows := _rows_in(value)):
            for number, row in enumerate(rows, start=1):
                share = size * number // len(rows) - size * (number - 1) // len(rows)
                yield json.dumps(row, ensure_ascii=False), f"{path}: row {number}", share
            return
        yield text[offset:end], origin, done - before
        offset, before = end, done
    if listed and text[offset : offset + 1] != "]":
        raise DataError(f"{path}: is a JSON list without its end; {files.REPLACE}")
    if not number:
        raise DataError(f"{path}: holds no rows; remove it from the data's paths")


def _is_list(line: str) -> bool:
    """Whether a line is a whole JSON list, which is a row where another list follows."""
    try:
        return isinstance(json.loads(line), list)
    except (ValueError, RecursionError):
        return False


def _is_joined(line: str) -> bool:
    """Whether a line holds several objects, or one and a comma."""
    try:
        rest = line[json.JSONDecoder().raw_decode(line)[1] :].lstrip()
    except (ValueError, RecursionError):
        return False
    return rest == "," or rest.lstrip(", \t\r").startswith("{")


def _rows_in(document: Mapping[str, object]) -> list[object]:
    """Rows in a JSON file's only object; empty where it is a row itself: a list of messages is a conversation."""
    lists = [document[name] for name in _LISTS if isinstance(document.get(name), list)]
    rows = lists[0] if len(lists) == 1 and isinstance(lists[0], list) else []
    whole = all(isinstance(row, dict) and not row.keys() & {"role", "from"} for row in rows)
    return rows if whole else []


def _past(text: str, offset: int, skipped: str) -> int:
    while offset < len(text) and text[offset] in skipped:
        offset += 1
    return offset


def _separated_rows(path: Path, expected: Fingerprint | None, is_tsv: bool, nested: bool) -> RowLines:
    """Yields rows of a separated file; the first names the columns. Fields of a TSV file may be quoted."""
    reader, number, before, broken = None, 0, 0, list[files.BrokenRow]()
    try:
        with open_text(path, expected) as file:
            lines = _lines(path, file, broken)
            head = next(lines, "")
            is_tsv = is_tsv or _is_tabbed(head)
            separator = "\t" if is_tsv else _separator(head)
            quoting: Literal[0, 3] = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
            reader = csv.reader(chain([head], lines), delimiter=separator, quoting=quoting, strict=True)
            columns = [_unquote(name, is_tsv) for name in next(reader, [])]
            if broken:
                raise DataError(f"{path}:1: {broken[0]}")
            while (fields := _next_fields(reader, broken)) is not None:
                if not fields and not broken:
                    continue
                number += 1
                read = bytes_read(file)
                done = file.tell() if read is None else read
                origin = f"{path}:{reader.line_num}"
                values = (_unquote(field, is_tsv) for field in fields)
                row = dict(zip(columns, map(nested_value, values) if nested else values, strict=False))
                if len(fields) != len(columns):
                    broken.append(files.BrokenRow(f"has not as many columns as the first line; {files.FIX}"))
                yield broken[0] if broken else json.dumps(row, ensure_ascii=False), origin, max(0, done - before)
                broken.clear()
                before = max(done, before)
    except csv.Error as error:
        line_number = reader.line_num if reader else 1
        raise DataError(f"{path}:{line_number}: is not valid CSV: {error}; {files.FIX}") from error
    except OSError as error:
        raise files.unreadable(path, f"{path}:{reader.line_num + 1 if reader else 1}", error) from error
    if not number:
        raise DataError(f"{path}: holds no rows; remove it from the data's paths")


def _is_tabbed(head: str) -> bool:
    """Whether the first line of a CSV file has tabs between its columns, as STS-B's files do."""
    return "\t" in head and head.count("\t") > head.count(",") + head.count(";") and '"' not in head[:1]


def _separator(head: str) -> str:
    """Separator of a CSV file with this first line. Spreadsheets of many countries write semicolons."""
    plain = re.sub('"[^"]*"', "", head)
    return ";" if ";" in plain and "," not in plain else ","


def _next_fields(reader: Iterator[list[str]], broken: list[files.BrokenRow]) -> list[str] | None:
    """Fields of the next row; None at the end. Appends errors of CSV to ``broken``."""
    try:
        return next(reader, None)
    except csv.Error as error:
        broken.append(files.BrokenRow(f"is not valid CSV: {error}; {files.FIX}"))
        return []


def _lines(path: Path, file: IO[bytes], broken: list[files.BrokenRow]) -> Iterator[str]:
    """Yields the lines of a file with their line breaks; appends errors of UTF-8 to ``broken``."""
    offset, head = 0, b""
    for number, raw in enumerate(iter(partial(file.readline, files.LONGEST_LINE + 1), b""), start=1):
        if len(raw) > files.LONGEST_LINE:
            raise DataError(f"{path}:{number}: is longer than {files.LONGEST_LINE >> 20} MiB; {files.FIX}")
        head = head if len(head) >= files.HEAD else head + raw[: files.HEAD]
        line = files.decode_row(raw, f"{path}:{number}", offset, head)
        offset += len(raw)
        if isinstance(line, files.BrokenRow):
            broken.append(line)
            line = raw.decode("utf-8", errors="replace")
        yield line.removeprefix("\ufeff") if number == 1 else line


def nested_value(field: str) -> object:
    """Parses a field that is a JSON list; returns any other unchanged."""
    if field.lstrip()[:1] != "[":
        return field
    try:
        return json.loads(field, parse_constant=files.refuse_constant)
    except (ValueError, RecursionError):
        return field


def _unquote(field: str, is_tsv: bool) -> str:
    """Removes a TSV field's CSV quotes: outer quotes, and doubled ones inside."""
    inside = field[1:-1]
    if not is_tsv or len(field) < 2 or field[0] != '"' or field[-1] != '"' or '"' in inside.replace('""', ""):
        return field
    return inside.replace('""', '"')
