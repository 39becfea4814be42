"""Hash and comparison of runs by the identities that the fields of their keys state (:mod:`mgpu_pipe.config.identity`).

``auto`` finds a run by everything that decides its numbers; a new learning rate needs the run's name.
``scheduler.total_steps=null`` is one value, whatever ``trainer.max_steps`` is.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.identity import HASHED, Identity, stated_identity
from mgpu_pipe.config.plugins import with_first_classes
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import SECTIONS, hints

HASH_LENGTH = 16
FREE_OBJECTIVE_KEYS = tuple(
    f"objective.{name}" for name in ("loss_chunk_tokens", "sample_prompts", "sample_texts", "sample_max_new_tokens")
)
"""Keys that change no number under these names. Objectives of plug-ins state nothing of them."""
Difference = tuple[str, object, object]
"""Key, new value, old value."""


def _stated_keys(keys: type, prefix: str = "") -> Iterator[tuple[str, Identity]]:
    """Yields each key of a dataclass that states an identity, and that identity."""
    for key in fields(keys):
        identity, hint = stated_identity(key.metadata), hints(keys)[key.name]
        if identity is not None:
            yield f"{prefix}{key.name}", identity
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _stated_keys(hint, f"{prefix}{key.name}.")


@functools.lru_cache(maxsize=None)
def identities(*sections: type) -> dict[str, Identity]:
    """Identities that ``sections`` (and sections below) state, by key or section; the longest prefix of a key
    decides."""
    table = {**dict.fromkeys(FREE_OBJECTIVE_KEYS, Identity.FREE), **dict(_stated_keys(RunConfig))}
    for keys in sections:
        name = next(section.name for base, section in SECTIONS.items() if issubclass(keys, base))
        table.update(_stated_keys(keys, f"{name}."))
    return table


def identity_of(key: str) -> Identity:
    """Identity of a key of the schema, of an installed package, or of a key below one."""
    return _nearest(key, identities(*(keys for section in SECTIONS.values() for keys in section.all_keys().values())))


def _nearest(key: str, table: Mapping[str, Identity]) -> Identity:
    while key not in table:
        key = key.rpartition(".")[0]
        assert key, "a field of the schema states no identity"
    return table[key]


def mathematics_hash(config: RunConfig, length: int = HASH_LENGTH) -> str:
    """Hexadecimal hash of everything that decides a run's numbers: the start of a SHA-256.

    It hashes the written values, never those of the environment. Defaults of the schema are left out, so a key of a
    later version changes no run's hash.
    """
    plain = RunConfig()
    data, objective = type(config.data)(), type(config.objective)(name=plain.objective.name)
    defaults = _part(replace(plain, data=replace(data, source=plain.data.source), objective=objective), HASHED)
    changed = {
        key: value for key, value in _part(config, HASHED).items() if key not in defaults or defaults[key] != value
    }
    text = json.dumps(changed, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def differences(new: RunConfig, old: RunConfig, wanted: Container[Identity] = HASHED) -> list[Difference]:
    """Keys of these identities whose values differ, in the schema's order."""
    return list(unequal("", _part(new, wanted), _part(old, wanted)))


def _part(config: RunConfig, wanted: Container[Identity]) -> dict[str, Any]:
    """Values of the keys of these identities, by key; a free-form mapping is one value."""
    classes: list[type] = [type(getattr(config, section.name)) for section in SECTIONS.values()]
    table = identities(*classes)

    def walk(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and (key not in table or any(other.startswith(f"{key}.") for other in table)):
                values.update(walk(value, f"{key}."))
            elif _nearest(key, table) in wanted:
                values[key] = value
        return values

    values = walk(with_first_classes(to_plain(config)), "")
    if values.get("data.packing") == "best_fit":  # auto means best_fit wherever best_fit is allowed
        values["data.packing"] = "auto"
    if values.get("data.fit") == "squash":  # the earlier default; the digest of the data knows what a folder states
        values["data.fit"] = "auto"
    return values


def unequal(key: str, new: object, old: object) -> Iterable[Difference]:
    """The leaves below ``key`` that differ; a missing leaf counts as null."""
    if isinstance(new, dict) and isinstance(old, dict):
        for name in dict.fromkeys([*new, *old]):
            yield from unequal(f"{key}.{name}" if key else str(name), new.get(name), old.get(name))
    elif new != old:
        yield key, new, old
