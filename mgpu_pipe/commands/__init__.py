"""The verbs: one file each, which sets ``VERB``. A file's name is the verb's, less an underscore at its end."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu_pipe.config.arguments import VerbParser, parse


@dataclass(frozen=True)
class Verb:
    """What the program knows of a verb.

    Attributes:
        line: what it does, for the program's help.
        run: takes the words after the verb, returns the exit code; raises :class:`mgpu_pipe.errors.MgpuError`.
        composes: whether it takes a whole configuration, so that Hydra completes its overrides.
        section: the one section that it takes overrides of; empty: none.
        first_words: what the first word may be, for completion.
    """

    line: str
    run: Callable[[list[str]], int]
    composes: bool = False
    section: str = ""
    first_words: Callable[[], Sequence[str]] = tuple


def verb_names() -> list[str]:
    """Every verb; ``train`` first."""
    names = [module.name.rstrip("_") for module in pkgutil.iter_modules(__path__)]
    return sorted(names, key=lambda name: (name != "train", name))


def find_verb(name: str) -> Verb:
    """The verb of one of :func:`verb_names`."""
    module = next(module.name for module in pkgutil.iter_modules(__path__) if module.name.rstrip("_") == name)
    verb: Verb = importlib.import_module(f"{__name__}.{module}").VERB
    return verb


def takes_nothing(verb: str, description: str, words: list[str]) -> bool:
    """Whether to go on, for a verb without arguments; not after ``--help``, which is answered."""
    return parse(VerbParser(prog=f"mgpu-pipe {verb}", description=description), words) is not None
