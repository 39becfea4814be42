"""Every error a user can see, and its exit code.

A message is one line that names the key, the value and the fix. The command line prints it without a
traceback; anything that is not an :class:`MgpuError` is a defect of this program and keeps its traceback.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75


def one_line(text: object) -> str:
    """``text`` on one line, without secrets (:func:`conceal`) or control characters, which a terminal would follow."""
    line = _abridge(" ".join(part.strip() for part in conceal(str(text)).splitlines()))
    return printable(line, keep="")


HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of control and format characters, surrogates, and separators of lines and paragraphs."""
JOINERS = "\u200c\u200d"
"""Format characters that Persian, Hindi and emoji are written with."""


def printable(text: str, keep: str = "\n\t") -> str:
    """``text`` with U+FFFD for characters that a terminal would follow or hide, except those of ``keep``."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if _is_hidden(character, keep) else character for character in text)


def _is_hidden(character: str, keep: str) -> bool:
    return unicodedata.category(character) in HIDDEN_CATEGORIES and character not in keep + JOINERS


def print_line(text: object = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print one line; control characters of file names and contents do not reach the terminal."""
    print(printable(str(text), keep="\t"), file=file, flush=flush)


def print_text(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print a text of several lines; its control characters do not reach the terminal."""
    print(printable(str(text)), end=end, file=file, flush=flush)


LONGEST_SHOWN = 3000
"""Characters of an error's line; a picture or a whole document may stand where a name should."""
LONGEST_WORD, SHOWN = 1000, 80


def _abridge(line: str) -> str:
    """``line`` with long words cut, and its middle removed if it is long; the fix at its end stays."""
    if len(line) > LONGEST_WORD:
        line = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:SHOWN]}...", line)
    half = LONGEST_SHOWN // 2
    return line if len(line) <= LONGEST_SHOWN else f"{line[:half]} ... {line[-half:]}"


_hidden: dict[str, str] = {}
SHORTEST_HIDDEN = 4
"""Shorter values keep no secret, and would be found in every text."""


def hide(value: str, replacement: str) -> None:
    """Register a secret: :func:`conceal` replaces ``value`` by ``replacement`` from now on."""
    if len(value) >= SHORTEST_HIDDEN:
        _hidden[value] = replacement


def conceal(text: str) -> str:
    """``text`` with every value from the environment replaced by its interpolation."""
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, _hidden[value])
    return text


class MgpuError(Exception):
    """Base of every error that the user sees in one line."""

    exit_code = EXIT_FAILURE

    def to_json(self) -> str:
        """The JSON form in which a worker passes its error to the launcher."""
        return json.dumps({"type": type(self).__name__, "message": str(self), "exit_code": self.exit_code})


class BadInputError(MgpuError):
    """Something the user gave is wrong: configuration, data, model folder or checkpoint. Exit code 2."""

    exit_code = EXIT_BAD_INPUT


class ConfigError(BadInputError):
    """A configuration key has a value that cannot work.

    Args:
        key: full path of the key, e.g. ``trainer.devices``.
        value: what was given; shown as it was given.
        fix: what to write instead, as an imperative ("use 1, 2 or 4").
        reason: why the value cannot work, if the fix does not say it.
    """

    def __init__(self, key: str, value: object, fix: str, reason: str = "") -> None:
        self.key, self.value, self.fix, self.reason = key, value, fix, reason
        value_text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        super().__init__(f"{key}={value_text}: {reason + '; ' if reason else ''}{fix}")


class ConfigErrors(BadInputError):
    """Several configuration errors, reported together, one line each."""

    def __init__(self, errors: Sequence[BadInputError]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(str(error) for error in errors))


class DataError(BadInputError):
    """A data file is missing, empty or broken; names the file and, where there is one, the line."""


class ModelFolderError(BadInputError):
    """A model folder lacks something or does not fit its tokenizer."""


class RunFolderError(BadInputError):
    """A run folder cannot be used: not writable, not empty, or held by a living run."""


class CheckpointError(BadInputError):
    """A checkpoint is missing, damaged or of another model; names the file and the chunk."""


class CheckpointSaveError(MgpuError):
    """A checkpoint could not be written, e.g. on a full disk. The last good one stays."""


class NonFiniteError(MgpuError):
    """Something became NaN or infinite. All ranks raise it: before an update, for the loss or the gradient norm; before
    a save, for a weight or the optimizer's state.

    Args:
        last_good: the newest checkpoint that a finite step followed.
        updated: the update was made; else it was not.
    """

    def __init__(
        self, what: str, step: int, first_sample: int, last_sample: int, last_good: Path | None, updated: bool = False
    ) -> None:
        done = "it has no checkpoint" if updated else "the update was not applied"
        good = f"the last good checkpoint is {last_good}" if last_good else "no good checkpoint precedes it"
        super().__init__(
            f"{what} is not finite {'after' if updated else 'at'} step {step} (samples {first_sample} to "
            f"{last_sample}): {done} and {good}; lower optimizer.lr, set trainer.gradient_clip_val, or look at those "
            f"samples"
        )


class GradientSpikeError(MgpuError):
    """The gradient norm of a step stood out, and ``optimizer.spike_guard.action=stop``. Raised by all ranks.

    Args:
        what: the step, and by how much.
        saved: the checkpoint of the step before it.
    """

    def __init__(self, what: object, saved: Path | None) -> None:
        good = f"the step before it is saved in {saved}" if saved else "no checkpoint holds the step before it"
        fix = "check its samples, or resume with checkpoint.resume=auto optimizer.spike_guard.action=skip"
        super().__init__(f"{what}: its update was not applied and {good}; {fix}")


class WorkerError(MgpuError):
    """A worker died of something that is not the user's error; carries the tail of its own message."""


def print_error(error: MgpuError) -> None:
    """Print an error on stderr, one line; several errors one line each."""
    for single in error.errors if isinstance(error, ConfigErrors) else [error]:
        print_line(f"error: {one_line(single)}", file=sys.stderr)


def print_traceback() -> None:
    """Print the stack of the error that is being handled on stderr: a defect of this program."""
    print_text(conceal(traceback.format_exc()), end="", file=sys.stderr)


def raised_by(check: Callable[[], object]) -> list[BadInputError]:
    """The errors that ``check`` raises, as a list."""
    try:
        check()
    except ConfigErrors as several:
        return list(several.errors)
    except BadInputError as error:
        return [error]
    return []


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Runs every check, then raises their errors together as ConfigErrors."""
    errors = [error for check in checks for error in raised_by(check)]
    if errors:
        raise ConfigErrors(errors)


def section_of(error: BadInputError) -> str:
    """The section of the configuration whose key an error names, ``data`` of a file; empty where it names none."""
    if isinstance(error, DataError):
        return "data"
    return str(getattr(error, "key", "")).split(".")[0]
