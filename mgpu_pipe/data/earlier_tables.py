"""Tables that earlier versions read otherwise.

Their rows may still be in a cache, so these tables get another identity; all others keep theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from mgpu_pipe.data.cache import answer_once
from mgpu_pipe.data.compressed import codec_of, table_suffix
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, forget
from mgpu_pipe.data.parquet_rows import is_columnar
from mgpu_pipe.data.quoted_lines import AnewError
from mgpu_pipe.data.tables import has_joined_lists, has_twins, parts_of, row_lines
from mgpu_pipe.errors import DataError

_FORMAT = 1
"""Increased when :func:`is_table_anew` knows more tables; the cache keeps its answers."""


def marks_of_tables(contents: Sequence[str], known: Mapping[Path, Fingerprint], cache: Path) -> list[str]:
    """Marks that the identity of some files gets where earlier versions read a row of these tables otherwise.

    Args:
        contents: of the files, in their identity.
    """

    def ask() -> bool:
        try:
            return any(is_table_anew(path, expected) for path, expected in known.items())
        except ChangedFileError:
            forget(list(known), cache)
            raise

    return ["tables anew"] if answer_once(cache, ["tables", contents, _FORMAT], ask) else []


def is_table_anew(path: Path, expected: Fingerprint | None = None) -> bool:
    """Whether earlier versions left out or mixed up rows of a table.

    They read the first of several JSON lists, one header for all tables in a zip file, the last of columns with one
    name, and a part of a quoted field of TSV in each of its lines.
    """
    try:
        if codec_of(path) is None and is_columnar(path):
            return False
        if not (suffix := table_suffix(path)):
            return has_joined_lists(path, expected)
        if len(parts_of(path, expected)) > 1 or has_twins(path, expected):
            return True
        if suffix == ".tsv":
            deque(row_lines(path, expected), maxlen=0)
    except AnewError:
        return True
    except ChangedFileError:
        raise
    except DataError:  # reading its rows refuses it
        return False
    return False
