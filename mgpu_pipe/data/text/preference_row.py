"""A row with two answers to one prompt, the chosen and the rejected one, as two conversations.

The forms are those of TRL (``prompt``, ``chosen`` and ``rejected``, each a text or a list of messages) and of
UltraFeedback, where ``chosen`` and ``rejected`` are whole conversations.
"""

from __future__ import annotations

import json
from typing import Any

from mgpu_pipe.data.files import FIX, missing_column
from mgpu_pipe.data.text.conversations import is_trained, messages_of
from mgpu_pipe.errors import DataError

Messages = list[dict[str, Any]]
SIDES = ("chosen", "rejected")


def preference_of(row: dict[str, Any], origin: str, column: str) -> tuple[Messages, Messages]:
    """The two conversations; their messages are trained behind those that they share.

    Args:
        column: of the prompt, where it is a list of messages: ``data.messages_column``.

    Raises:
        DataError: what is wrong with it, with ``origin``.
    """
    whole = [_conversation(row, side, origin, column) for side in SIDES]
    shared = 0
    while shared < min(map(len, whole)) - 1 and whole[0][shared] == whole[1][shared]:
        shared += 1
    if not shared:
        raise DataError(f"{origin}: chosen and rejected do not begin with the same message; {FIX}")
    for side, messages in zip(SIDES, whole, strict=True):
        messages[:shared] = [{**message, "train": False} for message in messages[:shared]]
        if not any(message["role"] == "assistant" and is_trained(message) for message in messages):
            raise DataError(f"{origin}: {side} holds no answer of the assistant's of its own; {FIX}")
    return whole[0], whole[1]


def prompt_of(conversation: Messages) -> str:
    """What a pair of conversations shares, as one text: the same for all pairs of a prompt."""
    shared = [(message["role"], message["content"]) for message in conversation if message.get("train") is False]
    return json.dumps(shared)


def _conversation(row: dict[str, Any], side: str, origin: str, column: str) -> Messages:
    if side not in row:
        raise DataError(f"{origin}: has no column '{side}'; columns: {', '.join(row) or 'none'}")
    answer = row[side]
    if isinstance(answer, str):
        if not answer:
            raise DataError(f"{origin}: column '{side}' is empty; {FIX}")
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not answer or not isinstance(answer[0], dict):
        raise DataError(f"{origin}: column '{side}' must be a text or a list of messages; {FIX}")
    if answer[0].get("role", answer[0].get("from")) in ("assistant", "gpt"):
        answer = [*_prompt(row, origin, column), *answer]
    return messages_of({side: answer}, origin, side, "messages")


def _prompt(row: dict[str, Any], origin: str, column: str) -> list[Any]:
    prompt = row.get(column, row.get("prompt"))
    if prompt is None:
        raise missing_column(origin, "data.messages_column", column, list(row))
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{origin}: the prompt must be a text or a list of messages; {FIX}")
    return prompt
