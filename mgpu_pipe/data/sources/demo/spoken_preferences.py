"""``data=spoken_preferences``: the numbers of ``spoken_chat`` as preferences for the sentence."""

from __future__ import annotations

from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.sources.demo.spoken_chat import open_numbers

SOURCE = DataSource(
    name="spoken_preferences",
    samples="preferences",
    documents="preferences",
    reads=(*TEXT_KEYS, "messages_column", "numbers"),
    open=partial(open_numbers, "spoken_preferences", "preferences", 1),
)
