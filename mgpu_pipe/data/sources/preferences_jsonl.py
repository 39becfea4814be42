"""``data=preferences_jsonl``: two answers to each prompt, a row each, of which one is preferred."""

from __future__ import annotations

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.data.text.answer_format import answer_format
from mgpu_pipe.data.text.preference_rows import preference_of

FORMAT = answer_format("preferences_jsonl", "preferences", preference_of)
SOURCE = FORMAT.source(samples="preferences", reads=(*TEXT_KEYS, "messages_column"))
