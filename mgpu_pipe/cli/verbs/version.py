"""``mgpu-pipe version``."""

from __future__ import annotations

from mgpu_pipe import __version__
from mgpu_pipe.cli.verbs import Verb, without_arguments
from mgpu_pipe.errors import EXIT_OK, print_line


def version(words: list[str]) -> int:
    if without_arguments("version", "Print the version of this program.", words):
        print_line(f"mgpu_pipe {__version__}")
    return EXIT_OK


VERB = Verb("the version of this program", version)
