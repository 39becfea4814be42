"""Rows of Parquet and Arrow files, a batch at a time."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mgpu_pipe.data import files
from mgpu_pipe.data.fingerprint import Fingerprint, check_readable, open_data
from mgpu_pipe.errors import ConfigError, DataError, MgpuError, one_line

KEY = "data.text_column"
PARQUET, ARROW, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
"""First bytes of a Parquet file, and of the two forms of Arrow files; ``save_to_disk`` of datasets writes the last."""
UNLABELLED = -1
"""Class of a sample without a class in the datasets library."""
_ROWS, _KEPT_ROWS = 1024, 32
"""Rows in memory at once; rows that hold files are large."""
_log = logging.getLogger(__name__)


def is_columnar(path: Path) -> bool:
    """Whether a file begins like a Parquet or an Arrow file; DataError if it cannot be read."""
    check_readable(path)
    with open(path, "rb") as file:
        return file.read(len(ARROW)).startswith((PARQUET, ARROW, ARROW_STREAM))


def parquet_rows(path: Path, column: str, expected: Fingerprint | None = None) -> Iterator[tuple[str, str, int]]:
    """Yields the texts of one column of a file: ``(text, "file: row n", share of the file's size)``.

    Args:
        column: its name; ``meta.text`` may also be the field ``text`` of the struct ``meta``. Each element of a list is
            a text, whether the path names the elements (``text.element``) or not.

    A row without a value, or with a text that is not UTF-8, is a :class:`~mgpu_pipe.data.files.BrokenRow`.

    Raises:
        DataError: the file cannot be read or holds no rows, or the column is missing or holds no text.
    """
    with _open_rows(path, expected) as (file, size):
        steps = _text_column(path, file.schema_arrow, column)
        rows, number = file.num_rows, 0
        first = column if column in file.schema_arrow.names else column.split(".")[0]
        _warn_of_twins(path, file.schema_arrow.names, [first])
        for batch in file.iter_batches(batch_size=_ROWS, columns=[first]):
            for value in _list_values(batch.column(0)):
                number += 1
                where = f"{path}: row {number}"
                share = size * number // rows - size * (number - 1) // rows
                for index, text in enumerate(_texts_in(value, steps, column)):
                    yield text, where, 0 if index else share


def parquet_lines(
    path: Path, expected: Fingerprint | None = None, keep: Mapping[str, Callable[[bytes], str]] | None = None
) -> Iterator[tuple[str, str, int]]:
    """Yields the rows of a file as lines of JSON: ``(line, "file: row n", share of the file's size)``.

    Values without a JSON form become texts (dates) or null (NaN). So does the class -1 of a column with class names.
    Null fields of a struct are left out, since Parquet has every field in every row.

    Args:
        keep: for a column, a function from the bytes of a value to their replacement. Bytes of other columns become
            their UTF-8 text, or null.
    """
    with _open_rows(path, expected) as (file, size):
        rows, number, names = file.num_rows, 0, file.schema_arrow.names
        _warn_of_twins(path, names, names)
        kept_bytes, classed = keep or {}, [name for name in names if _class_names(file.schema_arrow, name)]
        for batch in file.iter_batches(batch_size=_KEPT_ROWS if kept_bytes else _ROWS):
            columns = [_list_values(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                number += 1
                where, share = f"{path}: row {number}", size * number // rows - size * (number - 1) // rows
                if broken := next((value for value in values if isinstance(value, files.BrokenRow)), None):
                    yield broken, where, share
                    continue
                row = dict(zip(reversed(names), reversed(values), strict=True))
                row |= {name: None for name in classed if row[name] == UNLABELLED}
                plain = {name: _plain(row[name], kept_bytes.get(name)) for name in dict.fromkeys(names)}
                yield json.dumps(plain, ensure_ascii=False), where, share


def check_column(path: Path, column: str) -> None:
    """Checks that a file opens and its column holds texts, without a row; errors: see :func:`parquet_rows`."""
    with _open_rows(path, None) as (file, _):
        _text_column(path, file.schema_arrow, column)


def class_names_of(path: Path, column: str) -> list[str]:
    """Names of the classes of a column by their numbers, from the features that the datasets library writes; empty
    without any."""
    with _open_rows(path, None) as (file, _):
        return _class_names(file.schema_arrow, column)


def _class_names(schema: Any, column: str) -> list[str]:
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        feature = features[column]
        names = feature.get("feature", feature).get("names")
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


class _Columns:
    """Record batches of a Parquet or Arrow file, its ``schema_arrow`` and the ``num_rows`` of the whole file."""

    def __init__(self, content: Any) -> None:
        import pyarrow.ipc
        import pyarrow.parquet

        self._content, head = content, content.read(len(ARROW))
        content.seek(0)
        self._parquet = None
        if head.startswith((ARROW, ARROW_STREAM)):
            self._open = pyarrow.ipc.open_file if head == ARROW else pyarrow.ipc.open_stream
            self.schema_arrow = self._open(content).schema
            self.num_rows = sum(batch.num_rows for batch in self._batches())
        else:
            self._parquet = pyarrow.parquet.ParquetFile(content)
            self.schema_arrow, self.num_rows = self._parquet.schema_arrow, self._parquet.metadata.num_rows

    def iter_batches(self, batch_size: int, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yields batches of at most ``batch_size`` rows with all columns, or those of these names."""
        if self._parquet is not None:
            yield from self._parquet.iter_batches(batch_size=batch_size, columns=columns)
            return
        names = self.schema_arrow.names
        for batch in self._batches():
            if columns is not None:
                batch = batch.select([names.index(name) for name in columns])
            batch.validate(full=True)  # the offsets of a spoiled file may lead anywhere
            for start in range(0, batch.num_rows, batch_size):
                yield batch.slice(start, batch_size)

    def _batches(self) -> Iterator[Any]:
        self._content.seek(0)
        reader = self._open(self._content)
        if hasattr(reader, "get_batch"):
            return (reader.get_batch(number) for number in range(reader.num_record_batches))
        return iter(reader)


@contextmanager
def _open_rows(path: Path, expected: Fingerprint | None) -> Iterator[tuple[_Columns, int]]:
    """Opens a file with rows; returns it and its size in bytes."""
    if find_spec("pyarrow") is None:
        raise ConfigError("data.source", "parquet", "install pyarrow", "pyarrow is not installed")
    size = check_readable(path)
    try:
        with open_data(path, expected) as content:
            file = _Columns(content)
            if not file.num_rows:
                raise DataError(f"{path}: holds no rows; remove it from the data's paths")
            yield file, size
    except MgpuError:
        raise
    except Exception as error:  # a broken file raises any kind of error
        said = one_line(error)[:200] or type(error).__name__
        raise DataError(f"{path}: is not a readable Parquet or Arrow file: {said}; {files.REPLACE}") from error


def _warn_of_twins(path: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    if twins := sorted(name for name in set(wanted) if names.count(name) > 1):
        _log.warning("%s: has several columns %r; the first one is read", path, twins[0])


def _text_column(path: Path, schema: Any, column: str) -> list[str]:
    """The struct fields on the way to a column's texts."""
    kind, steps = _leaf(path, schema, column)
    if not _is_text(kind):
        raise DataError(f"{path}: column '{column}' holds {kind}, not strings; set {KEY} to a text column")
    return steps


def _leaf(path: Path, schema: Any, column: str) -> tuple[Any, list[str]]:
    """Type at the end of a column's path, and the struct fields on the way."""
    import pyarrow

    names = schema.names
    first, *inner = [column] if column in names else column.split(".")
    if first not in names:
        raise files.missing_column(str(path), KEY, column, names)
    kind, steps = schema.field(names.index(first)).type, list[str]()
    parent = first
    while True:
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        elif _is_list(kind):
            if inner[:1] == [kind.field(0).name]:
                inner = inner[1:]
            kind = kind.value_type
        elif not inner:
            return kind, steps
        else:
            there = [kind.field(number).name for number in range(kind.num_fields)]
            if inner[0] not in there:
                raise files.missing_column(str(path), KEY, column, [f"{parent}.{name}" for name in there] or [first])
            parent = f"{parent}.{inner[0]}"
            steps.append(inner[0])
            kind = kind.field(there.index(inner.pop(0))).type


def _inside(value: Any, steps: Sequence[str]) -> Iterator[Any]:
    """Values at the end of a path in a value; several in a list, None for a missing one."""
    if isinstance(value, list):
        for part in value:
            yield from _inside(part, steps)
    elif value is None or not steps:
        yield value
    else:
        yield from _inside(value[steps[0]], steps[1:])


def _list_values(column: Any) -> list[Any]:
    """Values of a column; a :class:`BrokenRow` for a text that is not UTF-8."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        return [_value(column[row]) for row in range(len(column))]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return files.BrokenRow(f"holds a text that is not UTF-8 ({error.reason}); {files.FIX}")


def _texts_in(value: Any, steps: Sequence[str], column: str) -> list[str]:
    """Texts at the end of a path in a value, or one :class:`BrokenRow`."""
    texts = [value] if isinstance(value, files.BrokenRow) else list(_inside(value, steps))
    if not texts or None in texts:
        return [files.BrokenRow(f"has no value in column '{column}'; {files.FIX}")]
    return [text if isinstance(text, str) else files.decode_row(text, "", 0, b"") for text in texts]


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    )


def _is_text(kind: Any) -> bool:
    """Whether a type is a string of any layout, or bytes, which may be UTF-8."""
    return str(kind) in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def _plain(value: Any, keep: Callable[[bytes], str] | None) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part, keep) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part, keep) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        if keep is not None:
            return keep(value)
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
