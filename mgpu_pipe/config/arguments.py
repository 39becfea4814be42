"""Arguments of the verbs that take no configuration: a wrong one is an error of one line, as everywhere."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mgpu_pipe.errors import EXIT_OK, BadInputError


class VerbParser(argparse.ArgumentParser):
    """``argparse`` that raises instead of leaving the program, and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{self.prog}: {message}; see {self.prog} --help")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace | None:
    """The arguments; None after ``--help``, which was answered.

    Raises:
        BadInputError: a wrong argument.
    """
    try:
        return parser.parse_args(words)
    except SystemExit as ended:
        if ended.code not in (None, EXIT_OK):
            raise
        return None


def positive_int(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 1, "use a whole number of at least 1"))


def count(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 0, "use a whole number of at least 0"))


def non_negative(text: str) -> float:
    return _number(text, float, lambda value: value >= 0, "use a number of at least 0")


def share(text: str) -> float:
    return _number(text, float, lambda value: 0 < value <= 1, "use a number above 0 and at most 1")


def _number(text: str, kind: type[int] | type[float], fits: Callable[[float], bool], fix: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text}: {fix}")
    return value
