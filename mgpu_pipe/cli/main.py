"""``mgpu-pipe [verb] [overrides]``: finds the verb, completes words, and turns errors into a line and an exit code."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import NoReturn

from mgpu_pipe.cli.verbs import Verb, find_verb, verb_names
from mgpu_pipe.config.paths import working_directory
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_OK,
    BadInputError,
    MgpuError,
    print_error,
    print_line,
    print_text,
)
from mgpu_pipe.launch.signals import asks_for_a_run
from mgpu_pipe.system.local_files import FIXES, is_text, shorten
from mgpu_pipe.system.process_end import exit_now
from mgpu_pipe.system.standard_streams import outliving_streams, print_logs_safely

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
        raise BadInputError(
            f"-sc {QUERY}{shell}: is a question of the shell; set completion up by mgpu-pipe -sc install={shell}"
        )
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


PROGRAM = "mgpu-pipe"
HELP = """\
usage: mgpu-pipe [VERB] [OVERRIDES]
One Hydra configuration, one reproducible multi-GPU training run. Start with:
  mgpu-pipe experiment=quickstart                   train a small model
  mgpu-pipe check strategy=fsdp trainer.devices=4   see what a run would be
verbs:
{verbs}

VERB --help says more. Tab completion: eval "$(mgpu-pipe -sc install=bash)"
"""


def program() -> NoReturn:
    """The command ``mgpu-pipe``."""
    from mgpu_pipe.system.hardware import limit_threads

    limit_threads(os.environ)
    exit_now(main())


def main(arguments: list[str] | None = None) -> int:
    """Run the program; the return value is its exit code (0, 1, 2 or 75)."""
    print_logs_safely()
    words = sys.argv[1:] if arguments is None else arguments
    if not asks_for_a_run(words):
        return _main(words)
    with outliving_streams():
        return _main(words)


def _main(words: list[str]) -> int:
    try:
        working_directory()
        _check_text(words)
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a closed pipe is handled; not at the interpreter's exit
        return code
    except MgpuError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:  # while composing or in a verb; runs handle it themselves
        print_line("stopped", file=sys.stderr)
        return EXIT_FAILURE
    except BrokenPipeError:  # the reader of our output closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if error.errno not in FIXES:
            raise
        where = f"{shorten(str(error.filename))}: " if error.filename else ""
        print_error(BadInputError(f"{where}{(error.strerror or '').lower()}; {FIXES[error.errno]}"))
        return EXIT_BAD_INPUT


def _check_text(words: list[str]) -> None:
    """Refuse words that are not text: configuration, reports and the terminal are UTF-8."""
    for word in words:
        if not is_text(word):
            raise BadInputError(f"{shorten(word)}: is not valid UTF-8; rename the file, or correct the word")


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else "--help"
    verbs = verb_names()
    if first in ("-h", "--help", "help") and len(words) < 2:
        width = max(map(len, verbs))
        print_text(HELP.format(verbs="\n".join(f"  {name:<{width}}  {find_verb(name).line}" for name in verbs)), end="")
        return EXIT_OK
    if first == "help":
        if words[1] not in verbs:
            raise _unknown_verb(words[1])
        return _dispatch([words[1], "--help"])
    verb, rest = (first, words[1:]) if first in verbs else ("train", words)
    if find_verb(verb).composes:
        if "--version" in rest:
            return find_verb("version").run([])
        if shell := completing_shell(rest):
            return complete(rest, shell)
    if verb == first or not first or "=" in first or first.startswith(("-", "~")):
        return find_verb(verb).run(rest)
    raise _unknown_verb(first)


def _unknown_verb(word: str) -> BadInputError:
    from mgpu_pipe.config.suggest import VERBS, path_advice

    if meant := path_advice(word) or VERBS.get(word):
        return BadInputError(f"{PROGRAM} {word}: {meant}")
    verbs = choose_from(word, verb_names())
    return BadInputError(f"{PROGRAM} {word}: no such verb; {verbs}; overrides are written key=value")
