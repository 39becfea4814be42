"""Composes the points of a sweep; Hydra composes each combination of group choices once, in 0.1 s."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from mgpu_pipe.config.hydra.compose import Composition, compose_in, compose_raw, from_values, preprocess, task_overrides
from mgpu_pipe.config.hydra.interpolation import HYDRA_NODE, plain_values
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import all_hints
from mgpu_pipe.system.conf_folders import own_options

TOP = all_hints(RunConfig)
MACHINE_INTERPOLATION, MACHINE_SECTIONS = re.compile(r"\$\{mgpu\.\w+:\w*\}"), ("strategy", "trainer")
"""Interpolations that depend only on the machine and on these sections."""


@dataclass
class _Base:
    """Composition of a combination of group choices as plain values; ``computed`` if values depend on each other."""

    values: dict[str, Any]
    local_options: list[str]
    overrides: list[str]
    computed: bool


class PointComposer:
    """Composes jobs that share ``fixed`` overrides, in a :func:`~mgpu_pipe.config.hydra.compose.hydra_session`.

    Args:
        fixed: overrides of every job.
        config_name: primary configuration (Hydra's ``--config-name``).
    """

    def __init__(self, hydra: Any, fixed: Sequence[str], config_name: str) -> None:
        self._hydra, self._fixed, self._name = hydra, list(fixed), config_name
        self._bases: dict[tuple[str, ...], _Base | None] = {}
        self._parser = OverridesParser.create()

    def compose(self, point: Sequence[str]) -> Composition:
        """Compose the job of these further overrides; the result holds its errors."""
        return self._quickly(point) or compose_in(self._hydra, [*self._fixed, *point], self._name)

    def _quickly(self, point: Sequence[str]) -> Composition | None:
        """The composition if a point has only group choices and single values of existing keys, else None."""
        choices: list[str] = []
        values: list[tuple[list[str], Any]] = []
        for text in point:
            if "${" in text or text[0] in "+~" or text.startswith(HYDRA_NODE):
                return None
            try:
                override = self._parser.parse_override(text)
            except HydraException:  # reported by the full composition
                return None
            words, value = override.key_or_group.split("."), override.value()
            if len(words) == 1 and (words[0] not in TOP or is_dataclass(TOP[words[0]])):
                choices.append(text)
            elif isinstance(value, str | int | float | bool | None):
                values.append((words, value))
            else:
                return None
        base = self._base(tuple(choices)) if values else None
        if base is None:
            return None
        if base.computed and any(words[0] in MACHINE_SECTIONS for words, _ in values):
            return None
        changed = copy.deepcopy(base.values)
        for words, value in values:
            section: Any = changed
            for word in words[:-1]:
                section = section.get(word) if isinstance(section, dict) else None
            if not isinstance(section, dict) or isinstance(section.get(words[-1], {}), dict | list):
                return None
            section[words[-1]] = value
        return from_values(changed, [], [*base.overrides, *point], list(base.local_options))

    def _base(self, choices: tuple[str, ...]) -> _Base | None:
        """Cached base of these choices; None if values depend on one another or there are errors."""
        if choices not in self._bases:
            self._bases[choices] = self._compose_base(list(choices))
        return self._bases[choices]

    def _compose_base(self, choices: list[str]) -> _Base | None:
        good, errors = preprocess(self._hydra, [*self._fixed, *choices], self._name)
        fixed = good[: len(good) - len(choices)]
        if errors or [*fixed, *choices] != good:
            return None
        composed = compose_raw(self._hydra, good, self._name)
        values, unresolved = plain_values(composed)
        raw = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(raw, dict)
        written = str([value for name, value in raw.items() if name != HYDRA_NODE])
        if unresolved or "${" in MACHINE_INTERPOLATION.sub("", written):
            return None
        return _Base(values, own_options(composed.hydra.runtime), task_overrides(fixed), computed="${" in written)
