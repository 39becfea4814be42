"""Search space of a sweep: a range or a list of values for every key, optionally conditional."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from mgpu_pipe.config.convert import schema_keys
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.runs.resume_command import hydra_quoted

PARAMETER_KEYS = ("low", "high", "log", "values", "when")
"""Entries of a parameter written as a mapping."""
DIGITS = 6
"""Significant digits of a drawn number in an override."""


@dataclass(frozen=True)
class Parameter:
    """One key of the space.

    Attributes:
        values: the choices, as overrides write them; empty for a range.
        low, high: the ends of a range.
        log: whether draws from the range are logarithmic.
        whole: whether its values are whole numbers.
        when: condition: the parameter applies only if these keys have these values.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    when: Mapping[str, str] | None = None

    def applies(self, chosen: Mapping[str, str]) -> bool:
        return all(chosen.get(key) == value for key, value in (self.when or {}).items())

    def draw(self, generator: random.Random) -> str:
        """A value, drawn uniformly from the list or the range."""
        if self.values:
            return generator.choice(self.values)
        if self.whole and not self.log:
            return str(generator.randint(int(self.low), int(self.high)))
        if self.log:
            return self.text(self.low * (self.high / self.low) ** generator.random())
        return self.text(generator.uniform(self.low, self.high))

    def text(self, number: float) -> str:
        """``number``, clipped to the range, as overrides write it."""
        within = min(max(number, self.low), self.high)
        return str(round(within)) if self.whole else f"{within:.{DIGITS}g}"

    @property
    def ends(self) -> list[str]:
        """Values to check before a sweep: the choices, or the ends of the range."""
        return list(self.values) or [self.text(self.low), self.text(self.high)]


def parameter(key: str, value: Override | Any) -> Parameter:
    """Parameter of ``sweep.space.<key>`` or of a typed range; ConfigError if it is no space, or empty."""
    name = f"sweep.space.{key}"
    if isinstance(value, Mapping):
        when = value.get("when")
        if unknown := sorted(set(value) - set(PARAMETER_KEYS)):
            raise ConfigError(
                f"{name}.{unknown[0]}", value[unknown[0]], f"use {', '.join(PARAMETER_KEYS)}", "no such entry"
            )
        condition = (
            {other: _text(other, choice) for other, choice in when.items()} if isinstance(when, Mapping) else None
        )
        if "values" in value:
            return _read_list(name, key, [_text(key, choice) for choice in value["values"] or ()], condition)
        return _range(name, key, value.get("low"), value.get("high"), bool(value.get("log")), condition)
    if isinstance(value, list):
        return _read_list(name, key, [_text(key, choice) for choice in value], None)
    if isinstance(value, str):
        try:
            value = OverridesParser.create().parse_override(f"{key}={value}")
        except HydraException as error:
            raise ConfigError(name, value, "write interval(1e-5,1e-3), or a list of values", str(error)) from error
    if not isinstance(value, Override):
        raise ConfigError(name, value, "write interval(1e-5,1e-3), tag(log,interval(1e-5,1e-3)), or a list of values")
    sweep = value.value()
    if isinstance(sweep, IntervalSweep):
        return _range(name, key, sweep.start, sweep.end, "log" in sweep.tags, None)
    if not value.is_sweep_override():
        return _read_list(name, key, [value.get_value_element_as_str()], None)
    return _read_list(name, key, list(value.sweep_string_iterator()), None)


def _read_list(name: str, key: str, values: list[str], when: Mapping[str, str] | None) -> Parameter:
    if not values:
        raise ConfigError(name, "[]", "give values", "the space is empty")
    return Parameter(key, tuple(dict.fromkeys(values)), when=when)


def _range(name: str, key: str, low: Any, high: Any, log: bool, when: Mapping[str, str] | None) -> Parameter:
    numbers = [end for end in (low, high) if isinstance(end, int | float) and not isinstance(end, bool)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or not numbers[0] < numbers[1]:
        raise ConfigError(name, f"interval({low},{high})", "give a low and a higher end", "the space is empty")
    if log and numbers[0] <= 0:
        raise ConfigError(name, f"interval({low},{high})", "begin above 0", "a logarithmic scale has no 0")
    hint = dict(schema_keys()).get(key)
    whole = hint is int or "int" in str(hint).split() or (hint is None and all(isinstance(end, int) for end in numbers))
    if all(isinstance(end, int) for end in numbers) and hint is not float:
        whole = True
    return Parameter(key, (), float(numbers[0]), float(numbers[1]), log, whole, when)


def order_by_conditions(space: Mapping[str, Parameter]) -> list[Parameter]:
    """The parameters, each after those of its conditions; ConfigError for a circle, or a condition that never holds."""
    for parameter in space.values():
        for key, value in (parameter.when or {}).items():
            if value not in (space[key].values if key in space else ()):
                fix = f"search {key} too, by a list of values with {value} among them"
                raise ConfigError(f"sweep.space.{parameter.key}.when.{key}", value, fix, "it never holds")
    left, order = dict(space), list[Parameter]()
    while left:
        ready = next(
            (parameter for parameter in left.values() if not left.keys() & (parameter.when or {}).keys()), None
        )
        if ready is None:
            key, fix = next(iter(left)), "let one of these parameters have none"
            raise ConfigError(f"sweep.space.{key}.when", "...", fix, "the conditions depend on each other")
        order.append(left.pop(ready.key))
    return order


def _text(key: str, value: object) -> str:
    if isinstance(value, str):
        return as_override(key, value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_override(key: str, text: str) -> str:
    """``text`` as Hydra reads it: quoted unless it is a number, word, list or mapping."""
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException:
        return hydra_quoted(text)
    return hydra_quoted(text) if parsed.is_sweep_override() else parsed.get_value_element_as_str()


def flat(space: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Parameters of ``sweep.space`` by dotted key."""
    for name, value in space.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not set(value) & {"low", "high", "values"}:
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def as_record(space: list[Parameter]) -> list[dict[str, Any]]:
    return [{**vars(parameter), "values": list(parameter.values)} for parameter in space]


def from_record(records: list[dict[str, Any]]) -> list[Parameter]:
    try:
        return [Parameter(**{**record, "values": tuple(record["values"])}) for record in records]
    except (TypeError, KeyError) as error:
        raise BadInputError(f"sweep.json: its space is not valid ({error}); restore it from a copy") from error
