"""Rows of tables: JSON Lines, one JSON list, CSV, TSV or Parquet.

Each row becomes a line of JSON that :func:`mgpu_pipe.data.files.json_row` reads. A file with Parquet's first bytes is
Parquet; the suffix names ``.csv`` and ``.tsv``; all else is JSON.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import unquote_to_bytes

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import BadSampleError, Fault, rows_of_files, unusable_files
from mgpu_pipe.data.compressed import bytes_read, codec_of, open_text, table_suffix
from mgpu_pipe.data.fingerprint import Fingerprint, check_readable
from mgpu_pipe.data.parquet_rows import is_parquet, parquet_lines
from mgpu_pipe.data.text.label_rows import label_of
from mgpu_pipe.errors import ConfigError, DataError

Keep = Callable[[bytes], str]
"""Function from a file's content to the name of a file with this content."""
EMBEDDED = "embedded-"
"""Prefix of the names of such files."""
_URI = re.compile(r"data:[^,]{0,200},", re.IGNORECASE)


def kept_in(cache: Path) -> Keep:
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


def looked_at(table: Path) -> Keep:
    """Builds a :data:`Keep` for checks that writes nothing: the table stands for every file in it."""
    return lambda content: str(table)


def file_named(value: object, keep: Keep) -> object:
    """Returns the name of the file that a value contains or names; any other value unchanged.

    Raises:
        BadSampleError: a ``data:`` URI that cannot be read.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
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
    """Whether :func:`kept_in` wrote the file, so that its name means nothing to the user."""
    return path.name.startswith(EMBEDDED)


RowLines = Iterator[tuple[str, str, int]]
"""For each row: its line of JSON, its origin, and its share of the file's bytes."""
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
    if codec_of(path) is None and is_parquet(path):
        return parquet_lines(path, expected, keep)
    if suffix := table_suffix(path):
        return _separated(path, expected, "," if suffix == ".csv" else "\t", nested)
    return _json(path, expected)


def _json(path: Path, expected: Fingerprint | None) -> RowLines:
    lines = files.read_lines(path, expected)
    first = next(lines)
    start = first[0].strip()
    if not start.startswith("[") and start != "{":
        yield first
        yield from lines
        return
    text = files.decode(files.read_bytes(path, expected), str(path)).removeprefix("\ufeff")
    size, decoder = check_readable(path), json.JSONDecoder(parse_constant=files.refuse_constant)
    offset, number, listed = _past(text, 0, " \t\r\n"), 0, text.lstrip()[:1] == "["
    offset, before = offset + listed, 0
    while (offset := _past(text, offset, " \t\r\n,")) < len(text) and not (listed and text[offset] == "]"):
        number += 1
        origin = f"{path}: row {number}"
        try:
            end = decoder.raw_decode(text, offset)[1]
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin}: is not valid JSON: {error.msg} (line {error.lineno}, character {error.colno}); {files.FIX}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin}: is not valid JSON: {error}; {files.FIX}") from error
        done = size * end // len(text)
        yield text[offset:end], origin, done - before
        offset, before = end, done
    if listed and text[offset : offset + 1] != "]":
        raise DataError(f"{path}: is a JSON list without its end; {files.REPLACE}")
    if not number:
        raise DataError(f"{path}: holds no rows; remove it from the data's paths")


def _past(text: str, offset: int, skipped: str) -> int:
    while offset < len(text) and text[offset] in skipped:
        offset += 1
    return offset


def _separated(path: Path, expected: Fingerprint | None, separator: str, nested: bool) -> RowLines:
    """Yields rows of a separated file; the first names the columns. Fields of a TSV file may be quoted."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE
    reader, number, before, broken = None, 0, 0, list[files.BrokenRow]()
    try:
        with open_text(path, expected) as file:
            reader = csv.reader(_lines(path, file, broken), delimiter=separator, quoting=quoting, strict=True)
            columns = [_unquoted(name, separator) for name in next(reader, [])]
            if broken:
                raise DataError(f"{path}:1: {broken[0]}")
            while (fields := _next_fields(reader, broken)) is not None:
                if not fields and not broken:
                    continue
                number += 1
                read = bytes_read(file)
                done = file.tell() if read is None else read
                origin = f"{path}:{reader.line_num}"
                values = (_unquoted(field, separator) for field in fields)
                row = dict(zip(columns, map(_nested, values) if nested else values, strict=False))
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
        line = files.decoded(raw, f"{path}:{number}", offset, head)
        offset += len(raw)
        if isinstance(line, files.BrokenRow):
            broken.append(line)
            line = raw.decode("utf-8", errors="replace")
        yield line.removeprefix("\ufeff") if number == 1 else line


def _nested(field: str) -> object:
    if field.lstrip()[:1] != "[":
        return field
    try:
        return json.loads(field, parse_constant=files.refuse_constant)
    except (ValueError, RecursionError):
        return field


def _unquoted(field: str, separator: str) -> str:
    """Removes a TSV field's CSV quotes: outer quotes, and doubled ones inside."""
    inside = field[1:-1]
    if separator == "," or len(field) < 2 or field[0] != '"' or field[-1] != '"' or '"' in inside.replace('""', ""):
        return field
    return inside.replace('""', '"')


SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
CAPTION, CLASSES = "caption", "classes"
LOOKED_AT = 1000
"""Rows of a Parquet file that a check reads; they may embed files."""
LONGEST_NAME = 200
"""Characters of a file name in a message: the column may also hold captions or base64 pictures."""


@dataclass(frozen=True)
class Part:
    """Part of a file, from ``offset`` on, and its fingerprint."""

    offset: int
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Entry:
    """A file, or a part of one, and its label.

    Attributes:
        origin: where the sample is named.
        fault: why the sample cannot be used; empty where nothing is known to be wrong.
    """

    path: Path
    label: str
    origin: str
    part: Part | None = None
    fault: str = ""

    @property
    def name(self) -> str:
        """Name in messages: the file, or the origin."""
        return self.origin if self.part or self.fault or is_embedded(self.path) else str(self.path)

    @property
    def fault_anywhere(self) -> str:
        """The fault without the folder of its list, so that it stays the same where the data moves."""
        folder = str(self.path.parent / "_")[:-1]
        return self.fault.replace(folder, "") if folder else self.fault


def fault_of(error: DataError | str, origin: str) -> str:
    """Reason in a sample's error, without the origin and the fix."""
    return str(error).removeprefix(f"{origin}: ").removesuffix(f"; {files.FIX}")


def entries_of(
    paths: Sequence[Path], data: DataConfig, key: str, file_key: str, told_key: str, what: str, keep: Keep | None = None
) -> Iterator[Entry]:
    """Yields the samples that lists name, in order; a row with a list of captions gives one for each.

    With ``data.on_bad_sample=skip`` a broken row, or the rest of a broken list, is an entry with a fault, as long as
    one row is whole.

    Args:
        key: the key that names the lists.
        file_key, told_key: keys of ``data`` that name the columns of paths (relative to the list's folder) and of
            classes or texts; ``what`` names the latter.
        keep: takes files that the rows hold; None for a check, which looks at the first rows of such a table.

    Raises:
        ConfigError: one is not a list.
        DataError: no row is whole; with ``data.on_bad_sample=stop``, a list that cannot be read, or a row that lacks a
            column or names a file that is not there.
    """
    columns = {name: str(getattr(data, name)) for name in (file_key, told_key)}
    skips, first, whole = data.on_bad_sample == "skip", "", False
    for path in paths:
        plain = Path(path.stem) if codec_of(path) else path
        if plain.suffix.lower() not in SUFFIXES:
            raise ConfigError(key, path, f"give files that end with {' or '.join(SUFFIXES)}", "is no list of files")
        unusable = unusable_files([path]) if skips else {}
        takes = keep or looked_at(path)
        read = partial(_list_rows, column=columns[file_key], takes=takes, whole=keep is not None)
        make = partial(_entries_in, folder=path.parent, columns=columns, what=what, keep=takes)
        for row in rows_of_files([path], unusable, read, make):
            entries = [_faulty(path, row)] if isinstance(row, Fault) else row
            for entry in entries:
                if entry.fault and not skips:
                    raise DataError(
                        row.message if isinstance(row, Fault) else f"{entry.origin}: {entry.fault}; {files.FIX}"
                    )
                whole = whole or not entry.fault
                yield entry
            first = first or (row.message if isinstance(row, Fault) else "")
    if first and not whole:
        raise DataError(first)


def _list_rows(path: Path, column: str, takes: Keep, whole: bool) -> RowLines:
    lines = row_lines(path, keep={column: takes})
    return lines if whole or codec_of(path) is not None or not is_parquet(path) else islice(lines, LOOKED_AT)


def _faulty(path: Path, fault: Fault) -> Entry:
    """The entry that stands for a refused row of a list, or for the rest of the list."""
    if fault.origin == str(path):
        origin, reason = fault.named()
    else:
        origin, reason = fault.origin, fault_of(fault.message, fault.origin)
    return Entry(path, "", origin, fault=reason)


def _entries_in(
    line: str, origin: str, size: int, folder: Path, columns: Mapping[str, str], what: str, keep: Keep
) -> list[Entry]:
    """Samples of a row; raises DataError where it names none."""
    row = files.json_row(line, origin, *columns.values())
    for name, column in columns.items():
        if column not in row:
            raise files.missing_column(origin, f"data.{name}", column, list(row))
    file_column, told_column = columns.values()
    try:
        named = file_named(row[file_column], keep)
    except BadSampleError as error:
        raise DataError(f"{origin}: {error}; {files.FIX}") from error
    if not isinstance(named, str) or not named or "\0" in named:
        raise DataError(f"{origin}: the file is {_shortened(repr(named))}, not a path; {files.FIX}")
    file = folder / named
    if not os.path.isfile(file):  # Path.is_file raises for too long names
        raise DataError(f"{origin}: there is no file {folder / _shortened(named)}; {files.FIX}")
    return [Entry(file, label, origin, fault=fault) for label, fault in labels_of(row, told_column, origin, what)]


def labels_of(row: Mapping[str, Any], column: str, origin: str, what: str) -> Iterator[tuple[str, str]]:
    """Labels of a row's picture or recording as (label, empty string); for an unusable row the reason comes second.

    A column of captions may hold a list of them. One of classes holds a list or names between commas, which give one
    label: a JSON list of their names.
    """
    value = row[column]
    if what == CLASSES:
        yield _list_of_classes(value, column, origin)
        return
    several = value if what == CAPTION and isinstance(value, list) and value else [value]
    for single in several:
        try:
            yield label_of({column: single}, column, origin, what), ""
        except DataError as error:
            yield "", fault_of(error, origin)


def _list_of_classes(value: object, column: str, origin: str) -> tuple[str, str]:
    if isinstance(value, str):
        value = _nested(value)
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list):
        names = [names]
    try:
        classes = {label_of({column: name}, column, origin) for name in names}
    except DataError as error:
        return "", fault_of(error, origin)
    return json.dumps(sorted(classes), ensure_ascii=False), ""


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
