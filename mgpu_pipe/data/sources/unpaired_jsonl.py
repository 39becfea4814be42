"""``data=unpaired_jsonl``: an answer and whether it is desirable, a row each."""

from __future__ import annotations

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.data.text.answer_format import answer_format
from mgpu_pipe.data.text.preference_rows import unpaired_of

FORMAT = answer_format("unpaired_jsonl", "unpaired", unpaired_of)
SOURCE = FORMAT.source(samples="unpaired", reads=(*TEXT_KEYS, "messages_column"))
