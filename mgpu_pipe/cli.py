"""``mgpu-pipe [verb] [overrides]``: finds the verb; the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from mgpu_pipe.commands import find_verb, verb_names
from mgpu_pipe.completion import asked_shell, complete
from mgpu_pipe.config.paths import working_directory
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, MgpuError, print_error
from mgpu_pipe.launch.console import outliving_streams
from mgpu_pipe.launch.process_exit import exit_now
from mgpu_pipe.launch.stop import asks_for_a_run

PROGRAM = "mgpu-pipe"
HELP = """\
usage: mgpu-pipe [VERB] [OVERRIDES]
One Hydra configuration, one reproducible multi-GPU training run. Start with:
  mgpu-pipe experiment=quickstart                   train a small model
  mgpu-pipe check strategy=fsdp trainer.devices=4   see what a run would be

verbs:
{verbs}

mgpu-pipe VERB --help tells what a verb takes.
Tab completion in bash: eval "$(mgpu-pipe -sc install=bash)"
"""


def program() -> NoReturn:
    """The command ``mgpu-pipe``."""
    from mgpu_pipe.config.threads import limit_threads

    limit_threads(os.environ)
    exit_now(main())


def main(arguments: list[str] | None = None) -> int:
    """Run the program; the return value is its exit code (0, 1, 2 or 75)."""
    words = sys.argv[1:] if arguments is None else arguments
    if not asks_for_a_run(words):
        return _main(words)
    with outliving_streams():
        return _main(words)


def _main(words: list[str]) -> int:
    try:
        working_directory()
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a reader that has left is expected, and not at the interpreter's end
        return code
    except MgpuError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:  # while composing or in a verb; a run has its own handling
        print("stopped", file=sys.stderr)
        return EXIT_FAILURE
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else "--help"
    verbs = verb_names()
    if first in ("-h", "--help", "help") and len(words) < 2:
        width = max(map(len, verbs))
        print(HELP.format(verbs="\n".join(f"  {name:<{width}}  {find_verb(name).line}" for name in verbs)), end="")
        return EXIT_OK
    if first == "help" and words[1] in verbs:
        return _dispatch([words[1], "--help"])
    verb, rest = (first, words[1:]) if first in verbs else ("train", words)
    if find_verb(verb).composes:
        if "--version" in rest:
            return find_verb("version").run([])
        if shell := asked_shell(rest):
            return complete(rest, shell)
    if verb == first or not first or "=" in first or first.startswith(("-", "~")):
        return find_verb(verb).run(rest)
    raise _unknown_verb(first)


def _unknown_verb(word: str) -> BadInputError:
    from mgpu_pipe.config.suggest import choose_from
    from mgpu_pipe.config.synonyms import VERBS, path_meant

    if meant := path_meant(word) or VERBS.get(word):
        return BadInputError(f"{PROGRAM} {word}: {meant}")
    verbs = choose_from(word, verb_names())
    return BadInputError(f"{PROGRAM} {word}: no such verb; {verbs}; overrides are written key=value")
