"""Reads a file of prompts, one JSON object a line: ``{"prompt": ...}`` or ``{"messages": [...]}``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.data import files
from mgpu_pipe.data.text.conversations import prompt_messages
from mgpu_pipe.errors import BadInputError, DataError, MgpuError
from mgpu_pipe.inference.generation import Prompt, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mgpu_pipe.data.text.render_chat import ChatTemplate

PROMPT, MESSAGES = "prompt", "messages"


@dataclass(frozen=True)
class PromptRow:
    """A row of a file of prompts.

    Attributes:
        line: its number in the file, from 1.
        prompt: None for a bad row.
        ids: the prompt's tokens, once it is encoded.
        error: names file, line and problem of a bad row; empty for a good one.
    """

    line: int
    prompt: Prompt | None
    ids: tuple[int, ...] = ()
    error: str = ""


def read_prompts(path: Path) -> list[PromptRow]:
    """The rows of the file; blank lines are skipped.

    Raises:
        DataError: the file cannot be read or has no row.
    """
    return [_row(line, origin) for line, origin, _ in files.read_lines(path)]


def _row(line: str, origin: str) -> PromptRow:
    number = int(origin.rpartition(":")[2])
    try:
        return PromptRow(number, _prompt(files.json_row(line, origin), origin))
    except DataError as error:
        return PromptRow(number, None, error=str(error))


def _prompt(row: dict[str, Any], origin: str) -> Prompt:
    if (PROMPT in row) == (MESSAGES in row):
        problem = f"has both {PROMPT} and {MESSAGES}" if PROMPT in row else f"has neither {PROMPT} nor {MESSAGES}"
        raise DataError(f'{origin}: {problem}; write {{"prompt": "..."}} or {{"messages": [...]}}')
    if MESSAGES in row:
        messages = prompt_messages(row[MESSAGES], MESSAGES, origin)
        for message in messages:
            files.check_unicode(str(message["content"]), origin)
        return messages
    if not isinstance(row[PROMPT], str):
        raise DataError(f"{origin}: {PROMPT} is a {type(row[PROMPT]).__name__}; write a string")
    files.check_unicode(row[PROMPT], origin)
    return str(row[PROMPT])


def encode_prompts(
    rows: list[PromptRow],
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatTemplate | None,
    context: int | None,
) -> Iterator[PromptRow]:
    """The rows with their tokens; a row that has no template, or no room in the context, becomes a bad one.

    Args:
        context: most tokens of prompt and answer; None for a model without a limit.
    """
    for row in rows:
        if row.prompt is None:
            yield row
            continue
        try:
            if chat is None and not isinstance(row.prompt, str):
                raise BadInputError("the model has no chat template for messages; give a prompt")
            ids = encode(tokenizer, row.prompt, chat)
            if context is not None and len(ids) >= context:
                raise BadInputError(
                    f"prompt of {len(ids)} tokens: the model's context is {context}; give a shorter prompt"
                )
            yield replace(row, ids=tuple(ids))
        except MgpuError as error:
            yield replace(row, prompt=None, error=f"{path}:{row.line}: {error}")


def refuse_bad_rows(rows: list[PromptRow]) -> None:
    """Raise the first bad row's error.

    Raises:
        DataError: there is a bad row.
    """
    bad = [row.error for row in rows if row.error]
    if bad:
        others = f" ({len(bad) - 1} more rows are bad)" if len(bad) > 1 else ""
        raise DataError(f"{bad[0]}{others}; correct it, or add --on-bad-row skip")


def make_batches(
    rows: list[PromptRow], batch_size: int, context: int | None, max_new_tokens: int
) -> list[list[PromptRow]]:
    """The good rows in batches of about equal length, longest first.

    They depend on the file and the settings alone, so that every number of processes computes the same batches. Rows
    that the context cuts short share a batch only with rows of their length, so that all end after as many tokens.
    """
    batches: list[list[PromptRow]] = []
    for row in sorted((row for row in rows if not row.error), key=lambda row: (-len(row.ids), row.line)):
        last = batches[-1] if batches else []
        is_cut = context is not None and len(last[0].ids if last else row.ids) + max_new_tokens > context
        if not last or len(last) == batch_size or (is_cut and len(row.ids) != len(last[0].ids)):
            batches.append([])
        batches[-1].append(row)
    return batches
