"""Every error a user can meet, and the exit code it ends the program with.

A message is one line that names the key, the value and the fix. The command line prints it without a
traceback; anything that is not an :class:`MgpuError` is a defect of this program and keeps its traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75


def one_line(text: object) -> str:
    """``text`` on one line, :func:`concealed`, and without control characters, which a terminal would follow."""
    line = " ".join(part.strip() for part in concealed(str(text)).splitlines())
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


_hidden: dict[str, str] = {}
SHORTEST_HIDDEN = 4
"""Shorter values keep no secret, and would be found in every text."""


def hide(value: str, shown: str) -> None:
    """From now on ``shown`` stands in the place of ``value`` wherever :func:`concealed` is asked."""
    if len(value) >= SHORTEST_HIDDEN:
        _hidden[value] = shown


def concealed(text: str) -> str:
    """``text`` with the interpolation in the place of every value that came from the environment."""
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, _hidden[value])
    return text


class MgpuError(Exception):
    """Base of every error that is told to the user in one line."""

    exit_code = EXIT_FAILURE

    def to_json(self) -> str:
        """The form in which a worker hands its error to the launcher."""
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
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        super().__init__(f"{key}={shown}: {reason + '; ' if reason else ''}{fix}")


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
    """Something became NaN or infinite: the loss or the gradient norm, told before the update, or, by the update, a
    weight or the optimizer's state, told when it is to be saved. Raised by all ranks.

    Args:
        last_good: the newest checkpoint that a finite step followed.
        updated: the update was made; else it was not.
    """

    def __init__(
        self, what: str, step: int, first_sample: int, last_sample: int, last_good: Path | None, updated: bool = False
    ) -> None:
        done = "no checkpoint is written of it" if updated else "the update was not applied"
        good = f"the last good checkpoint is {last_good}" if last_good else "there is no good checkpoint before it"
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
        good = f"the step before it is saved in {saved}" if saved else "nothing was saved"
        fix = "look at its samples, or go on with checkpoint.resume=auto optimizer.spike_guard.action=skip"
        super().__init__(f"{what}: its update was not applied and {good}; {fix}")


class WorkerError(MgpuError):
    """A worker died of something that is not the user's error; carries the tail of its own message."""


def print_error(error: MgpuError) -> None:
    """Print an error on stderr, one line; several errors one line each."""
    for single in error.errors if isinstance(error, ConfigErrors) else [error]:
        print("error:", one_line(single), file=sys.stderr)


def raised_by(check: Callable[[], None]) -> list[BadInputError]:
    """The errors that ``check`` raises, as a list."""
    try:
        check()
    except ConfigErrors as several:
        return list(several.errors)
    except BadInputError as error:
        return [error]
    return []


def section_of(error: BadInputError) -> str:
    """The section of the configuration whose key an error names; empty where it names none."""
    return str(getattr(error, "key", "")).split(".")[0]
