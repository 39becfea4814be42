"""What makes two runs the same run: one table of every key, for ``checkpoint.resume=auto`` and for a resume's checks.

========  =======================  ===========================================================
kind      in the mathematics hash  a resume with another value
========  =======================  ===========================================================
FIXED     yes                      is refused
CONTENT   yes                      compares what the key leads to: the data's digest, the model
TOLD      yes                      is told, and goes on with the new value
NOTED     no                       is told, and goes on with the new value
FREE      no                       goes on without a word
========  =======================  ===========================================================

So ``auto`` finds a run by all that decides its numbers, and only a run that is named goes on with another learning
rate. ``scheduler.total_steps=null`` is one value, whatever ``trainer.max_steps`` is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import hints

HASH_LENGTH = 16
Difference = tuple[str, object, object]
"""Key, new value, old value."""


class Kind(Enum):
    """What a key is to the run; see the module."""

    FIXED = "fixed"
    CONTENT = "content"
    TOLD = "told"
    NOTED = "noted"
    FREE = "free"


HASHED = (Kind.FIXED, Kind.CONTENT, Kind.TOLD)

KINDS: dict[str, Kind] = {
    "seed": Kind.FIXED,
    "run": Kind.FREE,
    "model.name": Kind.FREE,
    "model.type": Kind.FIXED,
    "model.path": Kind.CONTENT,
    "model.config": Kind.FIXED,
    "model.attn_implementation": Kind.NOTED,
    "model.flash_attention": Kind.NOTED,
    "model.freeze": Kind.TOLD,
    "model.compile": Kind.FREE,
    "model.kernels": Kind.NOTED,
    "data.source": Kind.FIXED,
    "data.paths": Kind.CONTENT,
    "data.text_column": Kind.CONTENT,
    "data.second_text_column": Kind.CONTENT,
    "data.label_column": Kind.CONTENT,
    "data.classes": Kind.CONTENT,
    "data.messages_column": Kind.CONTENT,
    "data.format": Kind.CONTENT,
    "data.source_column": Kind.CONTENT,
    "data.target_column": Kind.CONTENT,
    "data.chat_template": Kind.CONTENT,
    "data.synthetic": Kind.CONTENT,
    "data.numbers": Kind.CONTENT,
    "data.tokenizer": Kind.CONTENT,
    "data.seq_len": Kind.FIXED,
    "data.target_len": Kind.FIXED,
    "data.packing": Kind.FIXED,
    "data.global_batch_size": Kind.FIXED,
    "data.micro_batch_size": Kind.FREE,
    "data.balance": Kind.FREE,
    "data.validation_fraction": Kind.CONTENT,
    "data.validation_paths": Kind.CONTENT,
    "data.validation_max_samples": Kind.NOTED,
    "data.num_workers": Kind.FREE,
    "data.tokenize_workers": Kind.FREE,
    "data.cache_dir": Kind.FREE,
    "objective.name": Kind.FIXED,
    "objective.loss_chunk_tokens": Kind.FREE,
    "objective.sample_prompts": Kind.FREE,
    "objective.sample_texts": Kind.FREE,
    "objective.sample_max_new_tokens": Kind.FREE,
    "optimizer": Kind.TOLD,
    "optimizer._target_": Kind.FIXED,
    "scheduler": Kind.TOLD,
    "peft": Kind.FIXED,
    "peft.init_from": Kind.CONTENT,
    "strategy": Kind.FREE,
    "precision": Kind.NOTED,
    "checkpoint": Kind.FREE,
    "checkpoint.init_from": Kind.CONTENT,
    "trainer": Kind.FREE,
    "trainer.gradient_clip_val": Kind.TOLD,
    "trainer.deterministic": Kind.NOTED,
    "eval": Kind.FREE,
    "logger": Kind.FREE,
    "callbacks": Kind.FREE,
    "launch": Kind.FREE,
    "sweep": Kind.FREE,
}
"""By key or section; the longest one that a key begins with decides. Every key of the schema has an entry."""
OWN = {"data": Kind.CONTENT, "objective": Kind.FIXED, "strategy": Kind.FREE, "launch": Kind.FREE}
"""Of the keys that a plug-in or an objective declares."""


def kind_of(key: str) -> Kind:
    """The kind of a key of the schema, or of one below it."""
    section, _, name = key.partition(".")
    if section in OWN and key not in KINDS and name.partition(".")[0] not in hints(hints(RunConfig)[section]):
        return OWN[section]
    while key not in KINDS:
        key = key.rpartition(".")[0]
    return KINDS[key]


def mathematics_hash(config: RunConfig, length: int = HASH_LENGTH) -> str:
    """Hexadecimal identity of what decides a run's numbers: the start of a SHA-256.

    It depends on what is written, so not on the values of the environment; and only on what differs from the schema's
    defaults, so that a key which a later version brings changes no run's.
    """
    plain = RunConfig()
    data, objective = type(config.data)(), type(config.objective)(name=plain.objective.name)
    usual = _part(replace(plain, data=replace(data, source=plain.data.source), objective=objective), HASHED)
    part = {key: value for key, value in _part(config, HASHED).items() if key not in usual or usual[key] != value}
    text = json.dumps(part, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def differences(new: RunConfig, old: RunConfig, kinds: Iterable[Kind] = HASHED) -> list[Difference]:
    """Keys of these kinds whose values differ, in the schema's order."""
    wanted = tuple(kinds)
    return list(unequal("", _part(new, wanted), _part(old, wanted)))


def _part(config: RunConfig, kinds: Iterable[Kind]) -> dict[str, Any]:
    """The values of the keys of these kinds, by key; free-form mappings are one value."""
    wanted = tuple(kinds)

    def walk(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and (key not in KINDS or _has_entries_below(key)):
                values.update(walk(value, f"{key}."))
            elif kind_of(key) in wanted:
                values[key] = value
        return values

    return walk(to_plain(config), "")


def _has_entries_below(key: str) -> bool:
    return any(other.startswith(f"{key}.") for other in KINDS)


def unequal(key: str, new: object, old: object) -> Iterable[Difference]:
    """The leaves below ``key`` that differ; what is missing counts as null."""
    if isinstance(new, dict) and isinstance(old, dict):
        for name in dict.fromkeys([*new, *old]):
            yield from unequal(f"{key}.{name}" if key else str(name), new.get(name), old.get(name))
    elif new != old:
        yield key, new, old
