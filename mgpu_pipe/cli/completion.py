"""Tab completion of verbs, their flags and their words; Hydra completes group options and keys."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass

from mgpu_pipe.cli.verbs import Verb, find_verb, verb_names
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_text

QUERY = "query="


@dataclass(frozen=True)
class Choices:
    """Completions of the word under the cursor."""

    words: list[str]
    line: str | None
    """The command line without its verb, for Hydra to complete; None if Hydra adds nothing."""


def completing_shell(words: Sequence[str]) -> str | None:
    """The shell that requests completions; None without a request."""
    if not {"-sc", "--shell-completion"}.intersection(words):
        return None
    return next((word.removeprefix(QUERY) for word in words if word.startswith(QUERY)), None)


def complete(words: list[str], shell: str) -> int:
    """Print the completions of the last word of the line in ``COMP_LINE``."""
    from mgpu_pipe.config.hydra import command_line as hydra_cli

    line = os.environ.get("COMP_LINE", "")
    if not line.strip():
        raise BadInputError(f"-sc {QUERY}{shell}: is what the shell asks; set it up by mgpu-pipe -sc install={shell}")
    offered = choices(line)
    options = list(offered.words)
    if offered.line is not None:
        options += hydra_cli.completed_overrides(hydra_cli.parse(words), offered.line)
    print_text(("\n" if shell == "fish" else " ").join(options))
    return EXIT_OK


def choices(line: str) -> Choices:
    """Complete the last word of ``line``, the shell's command line up to the cursor."""
    program, *words = line.split() or [""]
    word = words.pop() if words and not line[-1].isspace() else ""
    verbs = verb_names()
    name = words[0] if words and words[0] in verbs else ""
    verb, rest = find_verb(name or "train"), words[1:] if name else words
    if word.startswith("-"):
        return Choices(_starting(word, _flags(verb)), None)
    options = _starting(word, [] if words else verbs)
    if name and not rest:
        options = _starting(word, verb.first_words())
    completes_section = bool(verb.section) and word.startswith(verb.section)
    return Choices(options, " ".join([program, *rest, word]) if verb.composes or completes_section else None)


def _starting(word: str, options: Sequence[str]) -> list[str]:
    return [option for option in options if option.startswith(word)]


def _flags(verb: Verb) -> list[str]:
    """Long flags in a verb's help."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()), suppress(SystemExit):
        verb.run(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", output.getvalue())))
