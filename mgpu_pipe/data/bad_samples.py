"""Unusable and too long samples: they stop the run or are left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mgpu_pipe.config.data_sources import samples_of
from mgpu_pipe.data.fingerprint import ChangedFileError, check_readable
from mgpu_pipe.errors import ConfigError, DataError, MgpuError, one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mgpu_pipe.config.schema import DataConfig


ALL_RULES = ("refuse", "drop", "truncate", "split")
UNABLE: dict[str, tuple[tuple[str, ...], str]] = {
    "labelled_text": (("split",), "a piece of a text may be of another class"),
    "pairs": (("split",), "no piece of a target belongs to a piece of its source"),
    "embedding_pairs": (("split",), "no piece of a text belongs to a piece of another"),
    "scored_pairs": (("split",), "no piece of a sentence has the score"),
    "preferences": (("truncate", "split"), "conversations that are cut compare other answers"),
    "unpaired": (("truncate", "split"), "a conversation that is cut ends with another answer"),
    "captioned_images": (("split",), "no piece of a caption describes the whole picture"),
    "captioned_sounds": (("split",), "no piece of a caption describes the whole recording"),
    "picture_chats": (("truncate", "split"), "a cut goes through the places of a picture"),
    "speech": (("truncate", "split"), "a part of a recording does not say its text"),
}
"""Rules of ``data.on_too_long`` that a kind of samples cannot follow, and why."""
DONE = {"drop": "left out", "truncate": "cut at their end", "split": "split into several samples"}


def rule_of(data: DataConfig, has_answers: bool = True) -> str:
    """Resolves ``data.on_too_long``: auto is split or drop."""
    if data.on_too_long != "auto":
        return data.on_too_long
    return "drop" if has_answers else "split"


def check_rule(data: DataConfig) -> None:
    """Refuses a rule that the source cannot follow; ConfigError names those that it can."""
    unable, reason = UNABLE.get(samples_of(data.source), ((), ""))
    if data.on_too_long in unable:
        able = ", ".join(rule for rule in ALL_RULES if rule not in unable)
        fix = f"use auto, {able}" if able else "leave it at auto"
        raise ConfigError("data.on_too_long", data.on_too_long, fix, f"data.source={data.source}: {reason}")


@dataclass(frozen=True)
class LengthLimit:
    """Largest length of a sample."""

    key: str
    """Configuration key of :attr:`value`."""
    value: float
    what: str
    """Name of the samples, in the plural."""
    unit: str = "tokens"


def refuse_too_long(limit: LengthLimit, lengths: NDArray[np.number]) -> None:
    """Raises ConfigError where one of the ``lengths``, (samples,), is beyond ``limit``; names their number and the
    longest."""
    number, total = int((lengths > limit.value).sum()), len(lengths)
    if number:
        most, position = lengths.max(), int(lengths.argmax()) + 1
        fix = f"use at least {most:g}, or leave them out by data.on_too_long=drop"
        reason = (
            f"{number:,} of {total:,} {limit.what} are longer, the longest (number {position}) has {most:g} "
            f"{limit.unit}; data.on_too_long=refuse"
        )
        raise ConfigError(limit.key, f"{limit.value:g}", fix, reason)


def describe_too_long(number: int, what: str, rule: str, limit: str) -> str:
    """Describes the ``number`` of ``what`` beyond ``limit`` (key and value), and what happens to them; empty if all
    fit."""
    return f"{number:,} {what} are longer than {limit}: {DONE[rule]} (data.on_too_long={rule})" if number else ""


_log = logging.getLogger(__name__)
NAMED = 5
"""Bad samples that a message names at most."""
LONGEST_REASON = 100
"""Characters of a decoder's message that are kept."""
OR_SKIP = "; data.on_bad_sample=skip leaves it out"
"""End of the message of a sample that stops the run."""
Content = TypeVar("Content")
Made = TypeVar("Made")


class BadSampleError(Exception):
    """A sample that cannot be used; the message completes a sentence that begins with its name."""


@contextmanager
def decoding(problem: str) -> Iterator[None]:
    """Turns a decoder's exception in the block into a :class:`BadSampleError` of ``problem``; our own errors pass
    through."""
    try:
        yield
    except (BadSampleError, MgpuError):
        raise
    except Exception as error:
        reason = one_line(getattr(error, "strerror", None) or error).strip()[:LONGEST_REASON] or type(error).__name__
        raise BadSampleError(f"{problem} ({reason})") from error


class Fault(NamedTuple):
    """A row that cannot be used.

    Attributes:
        message: the whole error, which names the row and says what to do.
        origin: where the row stands.
        size: its share of the progress.
    """

    message: str
    origin: str
    size: int

    def name_and_reason(self) -> tuple[str, str]:
        """The pair (name, reason) for :func:`report_bad_samples`."""
        where, _, rest = self.message.removeprefix(self.origin).partition(": ")
        return f"{self.origin}{where}", rest.partition("; ")[0]


def unusable_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Reason for each file that cannot be opened or is empty."""
    reasons = {}
    for path in dict.fromkeys(paths):
        try:
            check_readable(path)
        except DataError as error:
            reasons[path] = str(error).removeprefix(f"{path}: ").partition(";")[0]
    return reasons


def rows_of_files(
    paths: Iterable[Path],
    unusable: Mapping[Path, str],
    read: Callable[[Path], Iterator[tuple[Content, str, int]]],
    make: Callable[[Content, str, int], Made],
) -> Iterator[Made | Fault]:
    """Yields ``make``'s result for each row of some files; a :class:`Fault` for a refused row or rest of a file.

    Args:
        unusable: of :func:`unusable_files`.
        read: yields each row of a file: its content, its origin, and its share of the progress.

    Raises:
        ChangedFileError: a file changed since it was hashed.
    """
    for path in paths:
        if path in unusable:
            yield Fault(f"{path}: {unusable[path]}", str(path), 0)
            continue
        rows = read(path)
        while True:
            try:
                content, origin, size = next(rows)
            except StopIteration:
                break
            except ChangedFileError:
                raise
            except DataError as error:
                yield Fault(str(error), str(path), 0)
                break
            try:
                sample: Made | Fault = make(content, origin, size)
            except DataError as error:
                sample = Fault(str(error), origin, size)
            yield sample


def report_bad_samples(
    bad: Sequence[tuple[str, str]],
    on_bad_sample: str,
    kind: tuple[str, str] = ("a picture", "pictures"),
    number: int | None = None,
) -> None:
    """Logs the number of samples left out, and names the first ones.

    Args:
        bad: name and reason of each bad sample, or of the first :data:`NAMED`.
        on_bad_sample: the value of ``data.on_bad_sample``.
        kind: names of a sample and of several.
        number: of bad samples; None: the length of ``bad``.

    Raises:
        DataError: ``on_bad_sample`` is ``stop``, and there is a bad sample.
    """
    if not bad:
        return
    number = len(bad) if number is None else number
    more = f"; and {number - NAMED} more" if number > NAMED else ""
    listed = "; ".join(f"{name} {reason}" for name, reason in bad[:NAMED]) + more
    if on_bad_sample == "stop":
        what, them = (kind[0], "it") if number == 1 else (f"{number} {kind[1]}", "them")
        raise DataError(f"{listed}: replace {what}, or leave {them} out by data.on_bad_sample=skip")
    _log.warning("%d of the %s are left out: %s", number, kind[1], listed)
