"""One line of a file of labelled texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.errors import DataError


class Row(NamedTuple):
    """One line: its one or two texts, class, origin, and share of the progress."""

    texts: tuple[str, ...]
    label: str
    origin: str
    size: int

    @property
    def joined(self) -> str:
        """Text that decides the split, and that trains a tokenizer."""
        return "\n".join(self.texts)


def row_of(data: DataConfig, line: str, origin: str, size: int = 0) -> Row:
    """Parses a line of ``data.paths``.

    Raises:
        DataError: it is broken, or a column is missing or has another type.
    """
    keys = {"text_column": data.text_column, "label_column": data.label_column}
    if data.second_text_column is not None:
        keys["second_text_column"] = data.second_text_column
    row = files.json_row(line, origin, *keys.values())
    for key, column in keys.items():
        if column not in row:
            raise files.missing_column(origin, f"data.{key}", column, list(row))
    texts = [row[column] for key, column in keys.items() if key != "label_column"]
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"{origin}: a text is a {type(text).__name__}, not a string; {files.FIX}")
        files.check_unicode(text, origin)
    return Row(tuple(texts), label_of(row, data.label_column, origin), origin, size)


def label_of(row: Mapping[str, Any], column: str, origin: str, what: str = "class") -> str:
    """Class of a row (or another ``what``): a name or a whole number.

    Raises:
        DataError: it has another type.
    """
    label = row[column]
    if not isinstance(label, str | int) or isinstance(label, bool) or label == "":
        kind = "a name or a whole number" if what == "class" else "a text"
        problem = f"no {what}" if label in (None, "", []) else f"{label!r} as its {what}, not {kind}"
        raise DataError(f"{origin}: has {problem}; {files.FIX}")
    files.check_unicode(str(label), origin)
    return str(label)
