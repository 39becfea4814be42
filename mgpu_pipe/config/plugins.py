"""What installed packages register through entry points: names, found without importing them, and what they name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

DATA_GROUP = "mgpu_pipe.data"
DATA_KEYS_GROUP = "mgpu_pipe.data_keys"
OBJECTIVE_GROUP = "mgpu_pipe.objectives"
OBJECTIVE_KEYS_GROUP = "mgpu_pipe.objective_keys"
STRATEGY_GROUP = "mgpu_pipe.strategies"
STRATEGY_KEYS_GROUP = "mgpu_pipe.strategy_keys"
LAUNCH_GROUP = "mgpu_pipe.launchers"
LAUNCH_KEYS_GROUP = "mgpu_pipe.launch_keys"

PAIR_SOURCES = ("pairs_jsonl", "number_words")
IMAGE_SOURCES = ("digits", "image_folder", "image_list", "image_tar")
CAPTION_SOURCES = ("captioned_digits", "captioned_folder", "captions", "captioned_tar")
PICTURE_CHAT_SOURCES = ("digit_questions", "moving_shapes", "picture_chats")
AUDIO_SOURCES = ("spoken_digits", "audio_list")
DATA_SOURCES = (
    "stdlib_text",
    "text_files",
    "jsonl",
    "parquet",
    "chat_jsonl",
    "preferences_jsonl",
    "labelled_jsonl",
    *PAIR_SOURCES,
    "spoken_chat",
    "spoken_preferences",
    "mixture",
    "rule_chat",
    "rule_facts",
    "synthetic",
    *IMAGE_SOURCES,
    *CAPTION_SOURCES,
    *PICTURE_CHAT_SOURCES,
    *AUDIO_SOURCES,
)
FILE_SOURCES = (
    *("text_files", "jsonl", "parquet", "chat_jsonl", "preferences_jsonl", "labelled_jsonl", "pairs_jsonl"),
    *IMAGE_SOURCES[1:],
    *CAPTION_SOURCES[1:],
    *PICTURE_CHAT_SOURCES[2:],
    *AUDIO_SOURCES[1:],
)
"""Those that read the files of data.paths."""
PREFERENCE_SOURCES = ("preferences_jsonl", "spoken_preferences")
CONVERSATION_SOURCES = ("chat_jsonl", *PREFERENCE_SOURCES, "spoken_chat", "rule_chat", *PICTURE_CHAT_SOURCES)
"""Those whose rows a chat template renders."""
SAMPLES = {
    "labelled_jsonl": "labelled_text",
    **dict.fromkeys(PREFERENCE_SOURCES, "preferences"),
    **dict.fromkeys(PAIR_SOURCES, "pairs"),
    **dict.fromkeys(IMAGE_SOURCES, "labelled_images"),
    **dict.fromkeys(CAPTION_SOURCES, "captioned_images"),
    **dict.fromkeys(PICTURE_CHAT_SOURCES, "picture_chats"),
    **dict.fromkeys(AUDIO_SOURCES, "speech"),
}
"""The kind of samples that a data source gives; packed text where it is not listed."""
OBJECTIVES = (
    *("causal_lm", "masked_lm", "sequence_classification", "seq2seq", "dpo", "distill"),
    *("image_classification", "contrastive", "vision_language", "ctc", "speech_seq2seq"),
)
ENGINES = ("mesh", "deepspeed")
LAUNCHERS = ("local", "slurm", "torchrun")
LONGEST = 300
"""Characters of a stranger's message."""


def registered(group: str) -> tuple[str, ...]:
    """Names in an entry point group, sorted. Scans the installed distributions: some 10 ms."""
    return tuple(sorted({point.name for point in entry_points(group)}))


def load(key: str, name: str, group: str) -> Any:
    """What the entry point ``name`` of ``group`` names; its package is imported.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    points = {point.name: point for point in entry_points(group)}
    if name not in points:
        raise ConfigError(key, name, f"use one of {', '.join(points)}", "no such name")
    try:
        return points[name].load()
    except Exception as error:  # a stranger's module may raise anything
        reason = f"the entry point {points[name].value} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(key, name, "correct that package", " ".join(reason.split())[:LONGEST]) from error


def entry_points(group: str) -> EntryPoints:
    from importlib import metadata  # its own imports cost as much as a scan, and most commands make none

    return metadata.entry_points(group=group)


@contextmanager
def installed_modules_alone() -> Iterator[None]:
    """Import without the working folder, which may be somebody else's: only a `_target_` brings code from there."""
    try:
        here = {"", os.getcwd()}
    except FileNotFoundError:
        here = {""}
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if entry not in here]
    try:
        yield
    finally:
        sys.path[:] = before
