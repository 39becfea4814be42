"""``data=unpaired_jsonl``: an answer and whether it is desirable, a row each."""

from __future__ import annotations

from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.kinds import prepare_unpaired
from mgpu_pipe.data.source import DataSource
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.file_check import check_first_row
from mgpu_pipe.data.text.file_source import FileFormat, nested_rows
from mgpu_pipe.data.text.preference_rows import prompt_of
from mgpu_pipe.data.text.unpaired_rows import unpaired_of


def unpaired(data: DataConfig, line: str, origin: str, size: int) -> Document:
    column = data.messages_column
    messages, _ = unpaired_of(files.json_row(line, origin, column), origin, column)
    return Document(line, origin, size, key=prompt_of(messages))


def check_row(data: DataConfig, line: str, origin: str) -> None:
    unpaired_of(files.json_row(line, origin, data.messages_column), origin, data.messages_column)


FORMAT = FileFormat(
    name="unpaired_jsonl",
    rows=nested_rows,
    document=unpaired,
    check_file=partial(check_first_row, check_row=check_row, nested=True),
    columns=lambda data: ["unpaired", data.messages_column],
    kind="unpaired",
)


def check_unpaired(config: RunConfig) -> None:
    """Checks the files, then that the chat template renders the first conversation."""
    FORMAT.check(config)
    from mgpu_pipe.data.text.chat_templates import check_chat  # imports numpy, which other checks do not need

    check_chat(config)


SOURCE = DataSource(
    name="unpaired_jsonl",
    samples="unpaired",
    documents="unpaired",
    reads=(*TEXT_KEYS, "messages_column"),
    reads_files=True,
    check=check_unpaired,
    prepare=prepare_unpaired,
    open=FORMAT.open,
)
