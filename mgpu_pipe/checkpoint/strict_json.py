"""JSON of a checkpoint's files: one text for each value, and a parser that treats a file as hostile."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from mgpu_pipe.errors import CheckpointError

MAX_INTEGER = 2**63 - 1


def canonical(value: object) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces; equal values give equal bytes. ValueError or TypeError for what JSON
    lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse(data: bytes, where: str) -> Any:
    """The value of a JSON text; CheckpointError for invalid, deeply nested or repeated names, NaN and infinity."""
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_refuse_repeated_names, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not valid JSON ({error})") from error


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {repeated[:80]!r} appears twice")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def as_object(value: object, where: str, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """``value`` as a JSON object, with exactly ``keys`` unless they are None."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: is not a JSON object")
    if keys is not None and set(value) != set(keys):
        raise CheckpointError(f"{where}: has the keys {sorted(value)}, not {sorted(keys)}")
    return value


def as_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: is not a list")
    return value


def as_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: is not text")
    return value


def as_size(value: object, where: str) -> int:
    """A count, size or offset: an integer from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        text = repr(value)
        raise CheckpointError(f"{where}: {text[:40]} is not a size")
    return value


def as_sizes(value: object, where: str) -> tuple[int, ...]:
    return tuple(as_size(item, where) for item in as_list(value, where))
