"""Verbs, one file each, which sets ``VERB``. The file has the verb's name, plus ``_`` for a Python keyword."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu_pipe.config.arguments import VerbParser, parse


@dataclass(frozen=True)
class Verb:
    """A verb of the program.

    Attributes:
        line: summary for the program's help.
        run: takes the words after the verb and returns the exit code; raises :class:`mgpu_pipe.errors.MgpuError`.
        composes: whether it takes a whole configuration, whose overrides Hydra completes.
        section: the only section whose overrides it takes; empty for none.
        first_words: completions of the first word.
    """

    line: str
    run: Callable[[list[str]], int]
    composes: bool = False
    section: str = ""
    first_words: Callable[[], Sequence[str]] = tuple


def verb_names() -> list[str]:
    """Names of every verb; ``train`` first."""
    names = [module.name.rstrip("_") for module in pkgutil.iter_modules(__path__)]
    return sorted(names, key=lambda name: (name != "train", name))


def find_verb(name: str) -> Verb:
    """The verb ``name``, one of :func:`verb_names`."""
    module = next(module.name for module in pkgutil.iter_modules(__path__) if module.name.rstrip("_") == name)
    verb: Verb = importlib.import_module(f"{__name__}.{module}").VERB
    return verb


def without_arguments(verb: str, description: str, words: list[str]) -> bool:
    """Parse the words of a verb without arguments; False after ``--help``."""
    return parse(VerbParser(prog=f"mgpu-pipe {verb}", description=description), words) is not None
