"""Quoted fields of TSV files that go over several lines, which would become rows of a part each.

Programs that write CSV quote such a field and double its quotes. Other files have single quotes anywhere, as STS-B's.
"""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.errors import DataError


class AnewError(DataError):
    """A table is refused that earlier versions read, with wrong rows."""


class QuotedLines:
    """Refuses a field over several lines; after a quote that no program of CSV writes, quotes mean nothing."""

    def __init__(self, columns: int) -> None:
        self._columns, self._opened, self._after, self._is_plain = columns, "", 0, False

    def check(self, fields: Sequence[str], origin: str) -> None:
        """Looks at the next line; AnewError where it ends a field that an earlier line began."""
        if self._is_plain:
            return
        if self._opened:
            ends_at = len(fields) - self._after
            if _closes("\t".join(fields[:ends_at])) and all(map(_is_csv, fields[max(0, ends_at) :])):
                problem = "a quoted field goes over several lines, which a TSV file cannot hold"
                raise AnewError(f"{self._opened}: {problem}; write the table as CSV or JSON Lines")
            self._is_plain = any(map(_is_stray, fields))
            return
        *others, last = fields or [""]
        if _opens(last):
            self._opened, self._after = origin, max(0, self._columns - len(fields))
            self._is_plain = not all(map(_is_csv, others))
        else:
            self._is_plain = not all(map(_is_csv, fields))


def _is_stray(field: str) -> bool:
    """Whether a quote stands alone, not doubled."""
    return '"' in field.replace('""', "")


def _is_csv(field: str) -> bool:
    """Whether a field has no quotes, or is quoted as a whole."""
    return '"' not in field or (len(field) > 1 and field[0] == field[-1] == '"' and not _is_stray(field[1:-1]))


def _opens(field: str) -> bool:
    """Whether a field begins with a quote that its line does not end."""
    return field.startswith('"') and not _is_stray(field[1:])


def _closes(text: str) -> bool:
    """Whether a text ends with a quote that its line does not begin."""
    return text.endswith('"') and not _is_stray(text[:-1])
