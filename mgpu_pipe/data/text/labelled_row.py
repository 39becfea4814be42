"""One line of a file of labelled texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.errors import DataError


class Row(NamedTuple):
    """One line: its one or two texts, its class, where it stands, and its share of the progress."""

    texts: tuple[str, ...]
    label: str
    origin: str
    size: int

    @property
    def joined(self) -> str:
        """What the split goes by, and what a tokenizer is trained on."""
        return "\n".join(self.texts)


def row_of(data: DataConfig, line: str, origin: str, size: int = 0) -> Row:
    """A line of ``data.paths``.

    Raises:
        DataError: it is broken, lacks a column, or holds something else there.
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
    """The class of a row, or ``what`` stands in its place: a name or a whole number.

    Raises:
        DataError: it is something else.
    """
    label = row[column]
    if not isinstance(label, str | int) or isinstance(label, bool) or label == "":
        found = "nothing" if label == "" else repr(label)
        kind = "a name or a whole number" if what == "class" else "a text"
        raise DataError(f"{origin}: the {what} is {found}, not {kind}; {files.FIX}")
    files.check_unicode(str(label), origin)
    return str(label)
