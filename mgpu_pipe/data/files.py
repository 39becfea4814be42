"""Local data files: globs, strict UTF-8, rows of JSON lines and Parquet; text also compressed."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mgpu_pipe.config.hub import DATA, data_files
from mgpu_pipe.data.compressed import bytes_read, codec_of, open_text
from mgpu_pipe.data.fingerprint import READABLE, Fingerprint, check_readable, open_data
from mgpu_pipe.errors import ConfigError, DataError

_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",  # tables of character names, a megabyte that reads like no text
}
FIX = "correct or remove it"
LONGEST_LINE = 256 << 20
"""Bytes of a line of JSON: it is in memory several times while it becomes tokens."""
LARGEST_TEXT = 4 << 30
"""Bytes of a compressed file that is one document."""
REPLACE = "replace the file, or leave it out of the data's paths"


def expand_paths(patterns: Sequence[str], key: str) -> list[Path]:
    """The files that ``patterns`` (paths or globs, ``**`` included) name: sorted within a pattern, each file once.

    Those of a data set on the Hub, named at a commit, are fetched where they are not in this machine's cache.

    Raises:
        ConfigError: no pattern, or a pattern that matches no file.
    """
    if not patterns:
        raise ConfigError(key, "[]", "give at least one file or glob, e.g. 'corpus/**/*.txt'")
    found: dict[Path, None] = {}
    for pattern in patterns:
        if pattern.startswith(DATA):
            found.update(dict.fromkeys(data_files(pattern, key)))
            continue
        text = os.path.expanduser(pattern)
        # A name with brackets or stars in it may exist as it stands.
        names = [text] if os.path.exists(text) else sorted(glob.glob(text, recursive=True))
        files = [Path(name) for name in names if os.path.isfile(name)]
        if not files:
            if names and all(os.path.isdir(name) for name in names):
                raise ConfigError(key, pattern, f"name the files, e.g. '{pattern.rstrip('/')}/**/*'", "is a folder")
            raise ConfigError(
                key, pattern, "give a file or a glob that exists (seen from the working directory)", "matches no file"
            )
        found.update(dict.fromkeys(files))
    return list(found)


def stdlib_files() -> list[Path]:
    """The running Python's own library sources, tests and installed packages left out, sorted by relative path."""
    check_stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    return [root / name for name in sorted(os.path.relpath(name, root) for name in _stdlib_sources(root))]


def check_stdlib() -> None:
    """Raise a DataError where the running Python came without its library's sources."""
    root = Path(sysconfig.get_path("stdlib"))
    if not any(_stdlib_sources(root)):
        raise DataError(f"data.source=stdlib_text: {root} holds no library sources; use data.source=text_files")


def _stdlib_sources(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in _LEFT_OUT and not n.startswith("config-")]
        paths = (os.path.join(folder, name) for name in names if name.endswith(".py"))
        yield from (path for path in paths if os.path.isfile(path) and os.path.getsize(path))


def read_bytes(path: Path, expected: Fingerprint | None = None) -> bytes:
    """The content of ``path``, unpacked; a DataError names a file that cannot be read, is empty, or is not
    ``expected``."""
    try:
        with open_text(path, expected) as file:
            content = file.read() if codec_of(path) is None else file.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise _unreadable(path, str(path), error) from error
    if codec_of(path) is not None and len(content) > LARGEST_TEXT:
        raise DataError(f"{path}: unpacks to more than {LARGEST_TEXT >> 30} GiB; split it into documents")
    return content


def _unreadable(path: Path, where: str, error: OSError) -> DataError:
    codec = codec_of(path)
    if codec is None or error.strerror:
        return DataError(f"{path}: cannot be read: {error.strerror}; {READABLE}")
    return DataError(f"{where}: is not a whole {codec} file: {error}; {REPLACE}")


def decode(raw: bytes, where: str, offset: int = 0) -> str:
    """``raw`` as strict UTF-8; ``offset`` is where it begins in its file.

    Raises:
        DataError: not UTF-8; names ``where`` and the first bad byte's offset in the file.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{where}: is not UTF-8 (byte 0x{raw[error.start]:02x} at offset {at}); convert it, "
            f"e.g. with iconv -t UTF-8"
        ) from error


def check_unicode(text: str, origin: str) -> None:
    """Refuse a string that no file could hold: JSON can spell half of a surrogate pair.

    Raises:
        DataError: names ``origin``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which is not text; {FIX}"
        ) from error


def read_lines(path: Path, expected: Fingerprint | None = None) -> Iterator[tuple[str, str, int]]:
    """The lines of a text file that are not blank, unpacked: ``(line, "file:number", bytes of the file)``.

    Raises:
        DataError: the file cannot be read, is empty, not UTF-8 or not ``expected``, or a line is too long.
    """
    offset, rows, number, before = 0, 0, 0, 0
    try:
        with open_text(path, expected) as file:
            while raw := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(raw) > LONGEST_LINE:
                    raise DataError(
                        f"{path}:{number}: is longer than {LONGEST_LINE >> 20} MiB; {FIX}, or split it into documents"
                    )
                line = decode(raw, f"{path}:{number}", offset)
                offset += len(raw)
                if number == 1:
                    line = line.removeprefix("\ufeff")
                if line.strip():
                    rows += 1
                    read = bytes_read(file)
                    size, before = (len(raw), 0) if read is None else (read - before, read)
                    yield line, f"{path}:{number}", size
    except OSError as error:
        raise _unreadable(path, f"{path}:{number + 1}", error) from error
    if not rows:
        raise DataError(f"{path}: holds blank lines only; remove it from the data's paths")


def json_row(line: str, origin: str, *columns: str) -> dict[str, Any]:
    """One line of JSON as a mapping.

    Args:
        columns: those that will be asked for; ``meta.text`` is also the field ``text`` of the object ``meta``.

    Raises:
        DataError: broken JSON or not an object; names file and line.
    """
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        if form := _other_form(line, origin):
            raise DataError(f"{origin}: {form}") from error
        raise DataError(
            f"{origin}: is not valid JSON: {error.msg} (character {error.pos + 1} of the line); {FIX}"
        ) from error
    except ValueError as error:  # a number of too many digits, NaN, Infinity
        raise DataError(f"{origin}: is not valid JSON: {error}; {FIX}") from error
    except RecursionError as error:
        raise DataError(f"{origin}: is JSON nested too deeply; {FIX}") from error
    if not isinstance(row, dict):
        if isinstance(row, list) and (form := _other_form(line, origin)):
            raise DataError(f"{origin}: {form}")
        raise DataError(f"{origin}: is a JSON {type(row).__name__}, not an object with columns; {FIX}")
    for column in columns:
        found: Any = row
        for part in () if column in row else column.split("."):
            if not isinstance(found, dict) or part not in found:
                break
            found = found[part]
        else:
            row.setdefault(column, found)
    return row


def _other_form(line: str, origin: str) -> str | None:
    """What a file is whose first line is no object, and how it becomes JSON Lines."""
    path, _, number = origin.rpartition(":")
    start = line.strip()[:1]
    if number != "1" or not path:
        return None
    if start == "[":
        return f"is one JSON list, not an object a line; write them so: jq -c '.[]' {path}"
    if line.strip() == "{":
        return f"is JSON over several lines, not an object a line; write it so: jq -c . {path}"
    return None if start in '{"' else "is no JSON; write an object a line, or choose another source (mgpu-pipe ls data)"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def missing_column(where: str, key: str, column: str, there: Sequence[str]) -> DataError:
    """The error of a file without the configured column."""
    if len(there) == 1 and (other := next((mark for mark in ";\t|" if mark in there[0]), None)):
        fix = f"its columns are set apart by {other!r}: write commas"
    else:
        fix = f"set {key} to one that is there: {', '.join(there) or 'none'}"
    return DataError(f"{where}: has no column '{column}'; {fix}")


def _parquet_field(path: Path, schema: Any, column: str, key: str) -> tuple[Any, list[str]]:
    """The type of a column, and the names that lead to it inside of a struct."""
    first, *inner = [column] if column in schema.names else column.split(".")
    if first not in schema.names:
        raise missing_column(str(path), key, column, schema.names)
    kind = schema.field(first).type
    for part in inner:
        names = [kind.field(at).name for at in range(kind.num_fields)]
        if part not in names:
            raise missing_column(str(path), key, column, [f"{column.rpartition('.')[0]}.{name}" for name in names])
        kind = kind.field(names.index(part)).type
    return kind, inner


def parquet_rows(
    path: Path, column: str, key: str = "data.text_column", expected: Fingerprint | None = None
) -> Iterator[tuple[str, str, int]]:
    """The strings of one column of a Parquet file, a row group at a time: ``(text, "file: row n", share of size)``."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("data.source", "parquet", "install pyarrow", "pyarrow is not installed") from error
    size = check_readable(path)
    try:
        with open_data(path, expected) as content, pyarrow.parquet.ParquetFile(content) as file:
            schema = file.schema_arrow
            kind, inner = _parquet_field(path, schema, column, key)
            value_type = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (pyarrow.types.is_string(value_type) or pyarrow.types.is_large_string(value_type)):
                raise DataError(f"{path}: column '{column}' holds {kind}, not strings; set {key} to a text column")
            rows = file.metadata.num_rows
            if not rows:
                raise DataError(f"{path}: holds no rows; remove it from the data's paths")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    for part in inner:
                        text = None if text is None else text[part]
                    if text is None:
                        raise DataError(f"{path}: row {number} has no value in column '{column}'; {FIX}")
                    yield text, f"{path}: row {number}", size * number // rows - size * (number - 1) // rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a readable Parquet file: {error}".splitlines()[0] + f"; {REPLACE}") from error
