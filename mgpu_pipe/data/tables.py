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
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.compressed import bytes_read, codec_of, open_text, table_suffix
from mgpu_pipe.data.fingerprint import Fingerprint, check_readable
from mgpu_pipe.data.parquet_rows import is_columnar, parquet_lines
from mgpu_pipe.data.quoted_lines import AnewError, QuotedLines
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
_log = logging.getLogger(__name__)


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
    """Yields the rows of JSON Lines, of JSON lists, of objects one after another, or of the only object's list."""
    lines = files.read_lines(path, expected)
    first, second = next(lines), next(lines, None)
    if not _is_whole_json(first[0].strip(), None if second is None else second[0].strip()):
        yield first
        yield from () if second is None else (second, *lines)
        return
    yield from _rows_of_whole_json(path, expected)


def _is_whole_json(first: str, second: str | None) -> bool:
    """Whether a JSON file with these lines is no JSON Lines."""
    opened = _LIST_START.match(first)
    is_list = first.startswith("[") and not (second is not None and _is_row(first) and second[:1] == "[")
    is_whole = is_list or first == "{" or (opened and (second is None or first[opened.end() :] in "{"))
    return bool(is_whole) or _is_joined(first)


def _rows_of_whole_json(path: Path, expected: Fingerprint | None) -> RowLines:
    """Yields the rows of a JSON file that is no JSON Lines; its whole text is in memory."""
    text, size = _whole_text(path, expected), check_readable(path)
    number, before = 0, 0
    for number, value in enumerate(_values_in(text, path), start=1):
        is_lone = number == 1 and not value.list_number and not text[value.end :].strip()
        if is_lone and (rows := _rows_in(value.content)):
            for number, row in enumerate(rows, start=1):
                share = size * number // len(rows) - size * (number - 1) // len(rows)
                yield json.dumps(row, ensure_ascii=False), f"{path}: row {number}", share
            return
        done = size * value.end // len(text)
        yield text[value.start : value.end], f"{path}: row {number}", done - before
        before = done
    if not number:
        raise DataError(f"{path}: holds no rows; remove it from the data's paths")


def has_joined_lists(path: Path, expected: Fingerprint | None = None) -> bool:
    """Whether a JSON file has another list after its first; raises like :func:`row_lines`."""
    lines = files.read_lines(path, expected)
    first, second = next(lines)[0].strip(), next(lines, None)
    if not first.startswith("[") or not _is_whole_json(first, None if second is None else second[0].strip()):
        return False
    try:
        return any(value.list_number > 1 for value in _values_in(_whole_text(path, expected), path))
    except AnewError:
        return True


def _whole_text(path: Path, expected: Fingerprint | None) -> str:
    return files.decode(files.read_bytes(path, expected), str(path)).removeprefix("\ufeff")


class _Value(NamedTuple):
    """A value in a text of JSON: its content, where it starts and ends, and the number of its list, 0 for none."""

    content: Any
    start: int
    end: int
    list_number: int


def _values_in(text: str, path: Path) -> Iterator[_Value]:
    """Yields each value of a text that is JSON lists, such as those of a zip's members, or values in no list."""
    decoder = json.JSONDecoder(parse_constant=files.refuse_constant)
    offset, number, lists = _past(text, 0), 0, int(text.lstrip()[:1] == "[")
    offset += lists
    while (offset := _past(text, offset)) < len(text):
        if lists and text[offset] == "]":
            offset = _past(text, offset + 1)
            if offset == len(text):
                return
            if text[offset] != "[":
                raise AnewError(f"{path}: has other text after a JSON list; {files.FIX}")
            offset, lists = offset + 1, lists + 1
            continue
        number += 1
        origin = f"{path}: row {number}"
        try:
            content, end = decoder.raw_decode(text, offset)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin}: is not valid JSON: {error.msg} (line {error.lineno}, character {error.colno}); {files.FIX}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin}: is not valid JSON: {error}; {files.FIX}") from error
        yield _Value(content, offset, end, lists)
        offset = end
    if lists:
        raise DataError(f"{path}: is a JSON list without its end; {files.REPLACE}")


def _is_row(line: str) -> bool:
    """Whether a line is a whole JSON list without objects, which is a row where another list follows."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, list) and not any(isinstance(value, dict) for value in values)


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


def _past(text: str, offset: int) -> int:
    """Offset of the next value: skips white space, commas, and the byte order marks that joined files hold."""
    while offset < len(text) and text[offset] in " \t\r\n,\ufeff":
        offset += 1
    return offset


def _separated_rows(path: Path, expected: Fingerprint | None, is_tsv: bool, nested: bool) -> RowLines:
    """Yields rows of a separated file, or of each in a zip file, whose first line names the columns."""
    before, line = 0, None
    for member in parts_of(path, expected):
        for line, origin, done in _rows_of_part(path, expected, member, is_tsv, nested):
            yield line, origin, max(0, done - before)
            before = max(done, before)
    if line is None:
        raise DataError(f"{path}: holds no rows; remove it from the data's paths")


def parts_of(path: Path, expected: Fingerprint | None = None) -> Sequence[str | None]:
    """Names of the separated files in a zip file of several; else None; raises like ``members_of``."""
    members = files.members_of(path, expected)
    return members if len(members) > 1 else [None]


def _rows_of_part(path: Path, expected: Fingerprint | None, member: str | None, is_tsv: bool, nested: bool) -> RowLines:
    """Yields rows of one separated file: line of JSON, origin, and bytes read so far. Fields of TSV may be quoted."""
    table, broken, where = None, list[files.BrokenRow](), str(path) if member is None else f"{path}: {member}"
    try:
        with open_text(path, expected, member) as file:
            table = _Table(_lines(where, file, broken), is_tsv)
            table.warn_of_twins(where)
            if broken:
                raise DataError(f"{where}:1: {broken[0]}")
            quotes = QuotedLines(len(table.columns)) if table.is_tsv else None
            start = table.reader.line_num + 1
            while (fields := _next_fields(table.reader, broken)) is not None:
                # An unclosed quote ends with the file: the row's first line is the one to correct.
                origin = f"{where}:{start if broken and not fields else table.reader.line_num}"
                start = table.reader.line_num + 1
                if not fields and not broken:
                    continue
                if quotes is not None:
                    quotes.check(fields, origin)
                row = table.row(fields, nested)
                if len(fields) != len(table.columns):
                    broken.append(files.BrokenRow(f"has not as many columns as the first line; {files.FIX}"))
                read = bytes_read(file)
                done = file.tell() if read is None else read
                yield broken[0] if broken else json.dumps(row, ensure_ascii=False), origin, done
                broken.clear()
    except csv.Error as error:
        line_number = table.reader.line_num if table else 1
        raise DataError(f"{where}:{line_number}: is not valid CSV: {error}; {files.FIX}") from error
    except OSError as error:
        line_number = table.reader.line_num + 1 if table else 1
        raise files.unreadable(path, f"{where}:{line_number}", error) from error


class _Table:
    """Reader of a separated file, and the columns that its first line names."""

    def __init__(self, lines: Iterator[str], is_tsv: bool) -> None:
        head = next(lines, "")
        self.is_tsv = is_tsv or _is_tabbed(head)
        separator = "\t" if self.is_tsv else _separator(head)
        quoting: Literal[0, 3] = csv.QUOTE_NONE if self.is_tsv else csv.QUOTE_MINIMAL
        self.reader = csv.reader(chain([head], lines), delimiter=separator, quoting=quoting, strict=True)
        self.columns = [_unquote(name, self.is_tsv) for name in next(self.reader, [])]

    def twins(self) -> list[str]:
        """Names of several columns. Spreadsheets add columns without a name, which nothing reads."""
        return sorted(name for name in set(self.columns) if name and self.columns.count(name) > 1)

    def warn_of_twins(self, where: str) -> None:
        if twins := self.twins():
            _log.warning("%s: has several columns %r; the first one is read", where, twins[0])

    def row(self, fields: Sequence[str], nested: bool) -> dict[str, object]:
        row = dict[str, object]()
        for name, field in zip(self.columns, fields, strict=False):
            value = _unquote(field, self.is_tsv)
            row.setdefault(name, nested_value(value) if nested else value)
        return row


def has_twins(path: Path, expected: Fingerprint | None = None) -> bool:
    """Whether several columns of a separated file have one name; raises like :func:`row_lines`."""
    try:
        with open_text(path, expected) as file:
            return bool(_Table(_lines(str(path), file, []), table_suffix(path) == ".tsv").twins())
    except csv.Error:  # reading its rows refuses it
        return False
    except OSError as error:
        raise files.unreadable(path, f"{path}:1", error) from error


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


def _lines(where: str, file: IO[bytes], broken: list[files.BrokenRow]) -> Iterator[str]:
    """Yields the lines of a file with their line breaks; appends errors of UTF-8 to ``broken``."""
    offset, head = 0, b""
    for number, raw in enumerate(iter(partial(file.readline, files.LONGEST_LINE + 1), b""), start=1):
        if len(raw) > files.LONGEST_LINE:
            raise DataError(f"{where}:{number}: is longer than {files.LONGEST_LINE >> 20} MiB; {files.FIX}")
        head = head if len(head) >= files.HEAD else head + raw[: files.HEAD]
        line = files.decode_row(raw, f"{where}:{number}", offset, head)
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
