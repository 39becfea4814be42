"""``data=preferences_jsonl``: two answers to each prompt, a row each, of which one is preferred."""

from __future__ import annotations

from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.kinds import prepare_preferences
from mgpu_pipe.data.source import DataSource
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.file_check import check_first_row
from mgpu_pipe.data.text.file_source import FileFormat, nested_rows
from mgpu_pipe.data.text.preference_rows import preference_of, prompt_of


def preference(data: DataConfig, line: str, origin: str, size: int) -> Document:
    column = data.messages_column
    chosen, _ = preference_of(files.json_row(line, origin, column), origin, column)
    return Document(line, origin, size, key=prompt_of(chosen))


def check_row(data: DataConfig, line: str, origin: str) -> None:
    preference_of(files.json_row(line, origin, data.messages_column), origin, data.messages_column)


FORMAT = FileFormat(
    name="preferences_jsonl",
    rows=nested_rows,
    document=preference,
    check_file=partial(check_first_row, check_row=check_row, nested=True),
    columns=lambda data: ["preferences", data.messages_column],
    kind="preferences",
)


def check_preferences(config: RunConfig) -> None:
    """Checks the files, then that the chat template renders the first preference."""
    FORMAT.check(config)
    from mgpu_pipe.data.text.chat_templates import check_chat  # imports numpy, which other checks do not need

    check_chat(config)


SOURCE = DataSource(
    name="preferences_jsonl",
    samples="preferences",
    documents="preferences",
    reads=(*TEXT_KEYS, "messages_column"),
    reads_files=True,
    check=check_preferences,
    prepare=prepare_preferences,
    open=FORMAT.open,
)
