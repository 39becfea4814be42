"""``mgpu-pipe version``."""

from __future__ import annotations

from mgpu_pipe import __version__
from mgpu_pipe.commands import Verb, takes_nothing
from mgpu_pipe.errors import EXIT_OK


def version(words: list[str]) -> int:
    if takes_nothing("version", "Print the version of this program.", words):
        print(f"mgpu_pipe {__version__}")
    return EXIT_OK


VERB = Verb("the version of this program", version)
