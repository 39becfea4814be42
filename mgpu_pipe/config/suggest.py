"""Did-you-mean: the nearest valid word or key to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.6
LISTED = 30
LONGEST_WORD = 120
"""A longer word is no typo, and comparing takes quadratic time."""


def nearest(word: str, options: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The option nearest to ``word``, or None if none is near."""
    if len(word) > LONGEST_WORD:
        return None
    close = difflib.get_close_matches(word, list(options), n=1, cutoff=cutoff)
    return close[0] if close else None


def choose_from(word: str, options: Iterable[str]) -> str:
    """A fix for a wrong choice: ``did you mean ddp? (one of ddp, single)``.

    Args:
        word: the user's word.
        options: valid words; at most ``LISTED`` are listed.
    """
    names = sorted(set(options))
    listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    close = nearest(word, names)
    return f"did you mean {close}? (one of {listed})" if close else f"use one of {listed}"


def nearest_key(path: str, keys: Iterable[str]) -> str | None:
    """The valid dotted key nearest to ``path``.

    A key without a section comes first (``seed`` for ``data.seed``), then one of the same section, then any key with
    the same last word (``optimizer.lr`` for ``lr``), then the nearest whole path.
    """
    every = set(keys)
    sections = {key.rpartition(".")[0] for key in every}
    known = sorted(every - sections) if "." in path else sorted(every)
    section, _, last = path.rpartition(".")
    if last in every - sections:
        return last
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    close = nearest(last, siblings)
    if close:
        return siblings[close]
    same_word = [key for key in known if key.rpartition(".")[2] == last]
    if same_word:
        return nearest(path, same_word, cutoff=0.0)
    nearest_path = nearest(path, known, cutoff=0.8)
    if nearest_path:
        return nearest_path
    words = {key.rpartition(".")[2]: key for key in known}
    close = nearest(last, words, cutoff=0.75)
    return words[close] if close else None
