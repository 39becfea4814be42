"""Identity of a run: one table of every key, for ``checkpoint.resume=auto`` and for the checks of a resume.

========  =======================  ===========================================================
identity  in the mathematics hash  a resume with another value
========  =======================  ===========================================================
FIXED     yes                      is refused
CONTENT   yes                      compares what the key leads to: the data's digest, the model
NOTICE    yes                      uses the new value and prints a notice
RECORDED  no                       uses the new value and prints a notice
FREE      no                       uses the new value silently
========  =======================  ===========================================================

``auto`` finds a run by everything that decides its numbers; a new learning rate needs the run's name.
``scheduler.total_steps=null`` is one value, whatever ``trainer.max_steps`` is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.moved import with_first_classes
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import hints

HASH_LENGTH = 16
Difference = tuple[str, object, object]
"""Key, new value, old value."""


class Identity(Enum):
    """Role of a key in the identity of a run; the module's table explains each."""

    FIXED = "fixed"
    CONTENT = "content"
    NOTICE = "told"
    RECORDED = "noted"
    FREE = "free"


HASHED = (Identity.FIXED, Identity.CONTENT, Identity.NOTICE)

IDENTITIES: dict[str, Identity] = {
    "seed": Identity.FIXED,
    "run": Identity.FREE,
    "model.name": Identity.FREE,
    "model.type": Identity.FIXED,
    "model.path": Identity.CONTENT,
    "model.config": Identity.FIXED,
    "model.attn_implementation": Identity.RECORDED,
    "model.flash_attention": Identity.RECORDED,
    "model.freeze": Identity.NOTICE,
    "model.compile": Identity.FREE,
    "model.kernels": Identity.RECORDED,
    "data.source": Identity.FIXED,
    "data.paths": Identity.CONTENT,
    "data.text_column": Identity.CONTENT,
    "data.second_text_column": Identity.CONTENT,
    "data.label_column": Identity.CONTENT,
    "data.classes": Identity.CONTENT,
    "data.messages_column": Identity.CONTENT,
    "data.format": Identity.CONTENT,
    "data.source_column": Identity.CONTENT,
    "data.target_column": Identity.CONTENT,
    "data.chat_template": Identity.CONTENT,
    "data.synthetic": Identity.CONTENT,
    "data.numbers": Identity.CONTENT,
    "data.tokenizer": Identity.CONTENT,
    "data.seq_len": Identity.FIXED,
    "data.target_len": Identity.FIXED,
    "data.on_too_long": Identity.CONTENT,
    "data.on_bad_sample": Identity.CONTENT,
    "data.packing": Identity.FIXED,
    "data.global_batch_size": Identity.FIXED,
    "data.micro_batch_size": Identity.FREE,
    "data.balance": Identity.FREE,
    "data.validation_fraction": Identity.CONTENT,
    "data.validation_paths": Identity.CONTENT,
    "data.validation_max_samples": Identity.RECORDED,
    "data.num_workers": Identity.FREE,
    "data.tokenize_workers": Identity.FREE,
    "data.cache_dir": Identity.FREE,
    "objective.name": Identity.FIXED,
    "objective.loss_chunk_tokens": Identity.FREE,
    "objective.sample_prompts": Identity.FREE,
    "objective.sample_texts": Identity.FREE,
    "objective.sample_max_new_tokens": Identity.FREE,
    "optimizer": Identity.NOTICE,
    "optimizer._target_": Identity.FIXED,
    "scheduler": Identity.NOTICE,
    "peft": Identity.FIXED,
    "peft.init_from": Identity.CONTENT,
    "strategy": Identity.FREE,
    "precision": Identity.RECORDED,
    "checkpoint": Identity.FREE,
    "checkpoint.init_from": Identity.CONTENT,
    "trainer": Identity.FREE,
    "trainer.gradient_clip_val": Identity.NOTICE,
    "trainer.deterministic": Identity.RECORDED,
    "eval": Identity.FREE,
    "logger": Identity.FREE,
    "callbacks": Identity.FREE,
    "launch": Identity.FREE,
    "sweep": Identity.FREE,
}
"""Identity by key or section; the longest matching prefix decides. Every key of the schema has an entry."""
PLUGIN_KEYS = {
    "data": Identity.CONTENT,
    "objective": Identity.FIXED,
    "strategy": Identity.FREE,
    "launch": Identity.FREE,
}
"""Identity of the keys that a plug-in or an objective declares."""


def identity_of(key: str) -> Identity:
    """Identity of a key of the schema, or of a key below it."""
    section, _, name = key.partition(".")
    if (
        section in PLUGIN_KEYS
        and key not in IDENTITIES
        and name.partition(".")[0] not in hints(hints(RunConfig)[section])
    ):
        return PLUGIN_KEYS[section]
    while key not in IDENTITIES:
        key = key.rpartition(".")[0]
    return IDENTITIES[key]


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


def differences(new: RunConfig, old: RunConfig, identities: Iterable[Identity] = HASHED) -> list[Difference]:
    """Keys of these identities whose values differ, in the schema's order."""
    wanted = tuple(identities)
    return list(unequal("", _part(new, wanted), _part(old, wanted)))


def _part(config: RunConfig, identities: Iterable[Identity]) -> dict[str, Any]:
    """Values of the keys of these identities, by key; a free-form mapping is one value."""
    wanted = tuple(identities)

    def walk(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and (key not in IDENTITIES or _has_entries_below(key)):
                values.update(walk(value, f"{key}."))
            elif identity_of(key) in wanted:
                values[key] = value
        return values

    values = walk(with_first_classes(to_plain(config)), "")
    if values.get("data.packing") == "best_fit":  # auto means best_fit wherever best_fit is allowed
        values["data.packing"] = "auto"
    return values


def _has_entries_below(key: str) -> bool:
    return any(other.startswith(f"{key}.") for other in IDENTITIES)


def unequal(key: str, new: object, old: object) -> Iterable[Difference]:
    """The leaves below ``key`` that differ; a missing leaf counts as null."""
    if isinstance(new, dict) and isinstance(old, dict):
        for name in dict.fromkeys([*new, *old]):
            yield from unequal(f"{key}.{name}" if key else str(name), new.get(name), old.get(name))
    elif new != old:
        yield key, new, old
