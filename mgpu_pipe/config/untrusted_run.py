"""What of somebody else's configuration is followed: what it says of the data, never where anything lies.

A configuration is foreign unless this user's own launches wrote it (:func:`mgpu_pipe.config.freeze.load_untrusted`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from mgpu_pipe.config.plugins import DATA_SOURCES
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.config.sections import own_keys
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors

MADE = ("number_words", "spoken_chat", "spoken_preferences", "rule_chat", "rule_facts", "mixture", "synthetic")
READ_NO_FILES = ("stdlib_text", *MADE, "digits")
NOT_FOLLOWED = (
    "the cache ($MGPU_PIPE_CACHE) knows no launch of yours that made this configuration, so the files that it names "
    "are not read"
)
LARGEST = {"seq_len": 1 << 20, "global_batch_size": 1 << 16}
MOST_SYNTHETIC = 1 << 20
"""Documents, and tokens a document."""
MOST_DIGITS = 9


def untrusted_data(data: DataConfig, given: Set[str]) -> DataConfig:
    """``data`` without what leads out of the run's folder, as far as the command line did not give it.

    Args:
        given: the keys of the command line, such as ``data.paths``; ``data`` itself is another source.

    Raises:
        ConfigErrors: files that are needed and were not given, or sizes that no evaluation has.
    """
    errors: list[BadInputError] = []
    changes: dict[str, Any] = {}
    for name, without in (
        ("cache_dir", None),
        ("chat_template", None),
        ("tokenizer", "auto"),
        ("tokenize_workers", "auto"),
        ("micro_batch_size", "auto"),
    ):
        if f"data.{name}" not in given:
            changes[name] = without
    for name in ("paths", "validation_paths"):
        value, own = getattr(data, name), f"data.{name}" in given or "data" in given
        needed = bool(value) or (name == "paths" and data.source not in READ_NO_FILES)
        if needed and not own:
            fix = f"give data.{name}=[...] on the command line"
            errors.append(ConfigError(f"data.{name}", f"[{','.join(value)}]", fix, NOT_FOLLOWED))
    usual = type(data)()
    own = data.source not in DATA_SOURCES or data.source == "mixture"  # of a plug-in: any may name a file
    for name in own_keys(type(data)) if own else ():
        if (value := getattr(data, name)) != getattr(usual, name) and f"data.{name}" not in given:
            errors.append(ConfigError(f"data.{name}", value, f"give data.{name} on the command line", NOT_FOLLOWED))
    for name, most in LARGEST.items():
        if f"data.{name}" not in given and getattr(data, name) > most:
            fix = f"give at most {most:,} on the command line"
            errors.append(ConfigError(f"data.{name}", getattr(data, name), fix))
    for source, name, made, most in (
        ("synthetic", "synthetic.num_documents", data.synthetic.num_documents, MOST_SYNTHETIC),
        ("synthetic", "synthetic.mean_length", data.synthetic.mean_length, MOST_SYNTHETIC),
        (data.source, "numbers.count", data.numbers.count, MOST_SYNTHETIC),
        (data.source, "numbers.digits", data.numbers.digits, MOST_DIGITS),
        (data.source, "target_len", data.target_tokens(), LARGEST["seq_len"]),
    ):
        if data.source == source and "data" not in given and made > most:
            errors.append(ConfigError(f"data.{name}", made, f"give at most {most:,} on the command line"))
    if errors:
        raise ConfigErrors(errors)
    return replace(data, **changes)
