"""Tab completion: verbs, their flags and their words; group options and keys are Hydra's own completion."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass

from mgpu_pipe.help import COMPOSING

SECTIONS = {"eval": "data", "import": "model"}
"""Verbs that take the overrides of one section."""

Verb = Callable[[list[str]], int]


@dataclass(frozen=True)
class Choices:
    """What the word under the cursor may become."""

    own: list[str]
    line: str | None
    """The command line without its verb, for Hydra to complete; None where it has nothing to add."""


def choices(line: str, verbs: Mapping[str, Verb], words_of: Mapping[str, Callable[[], list[str]]]) -> Choices:
    """Complete the last word of ``line``, the command line up to the cursor as the shell hands it over.

    Args:
        verbs: every verb.
        words_of: the first words that verbs without a configuration take.
    """
    program, *words = line.split() or [""]
    word = words.pop() if words and not line[-1].isspace() else ""
    verb = words[0] if words and words[0] in verbs else ""
    rest = words[1:] if verb else words
    if word.startswith("-"):
        return Choices(_starting(word, _flags(verbs[verb or "train"])), None)
    own = [] if words else _starting(word, list(verbs))
    if verb in words_of and not rest:
        own = _starting(word, words_of[verb]())
    of_section = verb in SECTIONS and word.startswith(SECTIONS[verb])
    takes_overrides = not verb or verb in COMPOSING or of_section
    return Choices(own, " ".join([program, *rest, word]) if takes_overrides else None)


def _starting(word: str, options: list[str]) -> list[str]:
    return [option for option in options if option.startswith(word)]


def _flags(verb: Verb) -> list[str]:
    """The long flags that a verb's own help names."""
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(io.StringIO()), suppress(SystemExit):
        verb(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown.getvalue())))
