"""Converts a row with one completion and its label to a conversation, in TRL's form (``prompt``, ``completion``,
``label``).
"""

from __future__ import annotations

from typing import Any

from mgpu_pipe.data.files import FIX
from mgpu_pipe.data.text.conversations import BESIDE, HISTORY, INPUT
from mgpu_pipe.data.text.preference_rows import PROMPTS, Messages, conversation_of
from mgpu_pipe.errors import ConfigError, DataError

COMPLETION, LABEL = "completion", "label"
LABELS: dict[object, bool] = {True: True, False: False, "true": True, "false": False}
"""Values of a label; 1 and 0 equal true and false, and CSV holds texts."""


def unpaired_of(row: dict[str, Any], origin: str, column: str) -> tuple[Messages, bool]:
    """Converts a row to its conversation, of which only the completion is trained, and whether it is desirable.

    Args:
        column: ``data.messages_column``, the prompt as a list of messages.

    Raises:
        ConfigError: the column is that of the completion or of the label.
        DataError: the row is broken; names ``origin``.
    """
    if column in (COMPLETION, LABEL):
        raise ConfigError("data.messages_column", column, "name the column of the prompt", "holds something else")
    if LABEL not in row:
        raise DataError(f"{origin}: has no column '{LABEL}'; columns: {', '.join(row) or 'none'}")
    written = row[LABEL]
    label = written.lower() if isinstance(written, str) else written
    if not isinstance(label, (bool, int, str)) or label not in LABELS:
        raise DataError(f"{origin}: column '{LABEL}' holds {written!r}, not true or false; {FIX}")
    answer = row.get(COMPLETION)
    last = answer if isinstance(answer, list) else [answer]
    first = last[0] if last else None
    if isinstance(first, dict) and first.get("role", first.get("from")) not in ("assistant", "gpt"):
        raise DataError(f"{origin}: {COMPLETION} must begin with the assistant's message; {FIX}")
    messages = conversation_of(row, COMPLETION, origin, column)
    prompt = len(messages) - len(last)
    before = [{**message, "train": False} for message in messages[:prompt]]
    return [*before, *messages[prompt:]], LABELS[label]


def columns_read(column: str) -> list[str]:
    """Columns that become a conversation and its label."""
    return [*BESIDE, COMPLETION, LABEL, column, *PROMPTS, INPUT, HISTORY]
