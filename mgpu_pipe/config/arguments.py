"""Argument parser of the verbs that take no configuration; a wrong argument is an error of one line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import EXIT_OK, BadInputError
from mgpu_pipe.system.local_files import name_problem, shorten


class VerbParser(argparse.ArgumentParser):
    """``argparse`` that raises instead of exiting, and accepts no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self.register("type", Path, path_argument)  # for every argument of type=Path

    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{self.prog}: {message}; {self._suggestion(message)}see {self.prog} --help")

    def _suggestion(self, message: str) -> str:
        """The flag, choice or override nearest to a wrong word, as a question."""
        if chosen := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            close = nearest(chosen[1], re.findall(r"[\w-]+", chosen[2]))
            return f"did you mean {close}? " if close else ""
        flag = message.partition("unrecognized arguments: --")[2].partition(" ")[0].partition("=")[0]
        if not flag:
            return ""
        if "." in flag:
            return f"keys are set by key=value, without dashes: {flag}=...; "
        close = nearest(f"--{flag.replace('_', '-')}", self._option_string_actions)
        return f"did you mean {close}? " if close else ""


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace | None:
    """Parsed arguments, None after ``--help``; BadInputError for a wrong argument."""
    try:
        return parser.parse_args(words)
    except SystemExit as ended:
        if ended.code not in (None, EXIT_OK):
            raise
        return None


def path_argument(text: str) -> Path:
    """Path of an argument; refuses a name that no file or folder can have."""
    if problem := name_problem(text):
        raise argparse.ArgumentTypeError(f"{shorten(text)}: {problem}; check the path")
    return Path(text)


def positive_int(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 1, "use a whole number of at least 1"))


def count(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 0, "use a whole number of at least 0"))


def non_negative(text: str) -> float:
    return _number(text, float, lambda value: value >= 0, "use a number of at least 0")


def random_seed(text: str) -> int:
    return int(_number(text, int, lambda value: -(2**63) <= value < 2**63, "use a whole number of at most 63 bits"))


def byte_size(text: str) -> int:
    """A number of bytes: ``5GB``, ``500MB`` (powers of 1000), ``2GiB`` (of 1024), or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B)?", text.strip(), re.IGNORECASE)
    size = 0
    if match is not None:
        exponent = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** exponent)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text}: use a size such as 5GB, 500MB or 2GiB")
    return size


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
