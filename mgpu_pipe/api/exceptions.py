"""How errors are raised to those who call from Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mgpu_pipe.errors import ConfigErrors, MgpuError, concealed


@contextmanager
def as_exceptions() -> Iterator[None]:
    """One error alone is raised as itself; no message holds a value of the environment."""
    try:
        yield
    except ConfigErrors as several:
        for error in several.errors:
            error.args = (concealed(str(error)),)
        if len(several.errors) == 1:
            raise several.errors[0] from None
        raise ConfigErrors(several.errors) from None
    except MgpuError as error:
        error.args = (concealed(str(error)),)
        raise
