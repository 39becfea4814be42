"""Rows of the usual forms of conversations, as lists of messages.

The forms are those of OpenAI and transformers (``messages``), ShareGPT, Stanford Alpaca, and prompt and completion.
"""

from __future__ import annotations

import re
from typing import Any

from mgpu_pipe.data.files import missing_column
from mgpu_pipe.errors import DataError

PLACE, VIDEO = "<image>", "<video>"
"""The tokens that stand for a picture, and for a video, in a conversation."""
PLACES = re.compile(f"{PLACE}|{VIDEO}")
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Unicode noncharacters, which no text contains: they mark places in a rendering."""
SHAREGPT, ALPACA, COMPLETION = "conversations", ("instruction", "output"), ("prompt", "completion")
"""The columns that tell the forms apart."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "observation": "tool"}
"""What ShareGPT's rows call the roles of others."""


def messages_of(row: dict[str, Any], origin: str, column: str, form: str = "auto") -> list[dict[str, Any]]:
    """The messages of one row, each an object with a role and a content.

    Args:
        column: of the messages, ``data.messages_column``.
        form: ``data.format``; auto goes by the row's columns.

    Raises:
        DataError: what is wrong with it, with ``origin``.
    """
    if form == "auto":
        form = _form(row, column)
    if form == "alpaca":
        return _checked(_alpaca(row, origin), "instruction", origin)
    if form == "prompt_completion":
        return _checked(_completion(row, origin), "prompt", origin)
    if column not in row and form == "sharegpt":
        column = SHAREGPT
    if column not in row:
        lists = [name for name, value in row.items() if isinstance(value, list)]
        if lists:
            raise missing_column(origin, "data.messages_column", column, lists)
        forms = f"{SHAREGPT}, {' and '.join(ALPACA)}, or {' and '.join(COMPLETION)}"
        there = ", ".join(row) or "none"
        raise DataError(
            f"{origin}: has no column '{column}' (nor {forms}); rename its columns to some of these: {there}"
        )
    value = row[column]
    if isinstance(value, list):
        value = [_from_sharegpt(message) for message in value]
    return _checked(value, column, origin)


def is_trained(message: dict[str, Any]) -> bool:
    """Whether the loss counts this message of the assistant's; ``train`` or ``weight`` in it says no."""
    return bool(message.get("train", True)) and message.get("weight", 1) != 0


def _form(row: dict[str, Any], column: str) -> str:
    if column in row:
        return "messages"
    if SHAREGPT in row:
        return "sharegpt"
    if all(name in row for name in ALPACA):
        return "alpaca"
    return "prompt_completion" if all(name in row for name in COMPLETION) else "messages"


def _from_sharegpt(message: object) -> object:
    """``{"from": ..., "value": ...}`` as ``{"role": ..., "content": ...}``; anything else as it is."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": ROLES.get(str(message["from"]), message["from"]), "content": message.get("value"), **rest}


def _alpaca(row: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    instruction, answer = (_text(row, name, origin) for name in ALPACA)
    given = _text(row, "input", origin) if row.get("input") else ""
    system = [{"role": "system", "content": _text(row, "system", origin)}] if row.get("system") else []
    question = f"{instruction}\n\n{given}" if given else instruction
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _completion(row: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    sides = []
    for name, role in zip(COMPLETION, ("user", "assistant"), strict=True):
        if isinstance(row.get(name), list):
            sides += row[name]
        else:
            sides.append({"role": role, "content": _text(row, name, origin)})
    return sides


def _text(row: dict[str, Any], name: str, origin: str) -> str:
    if name not in row:
        raise DataError(f"{origin}: no column '{name}', which data.format needs; columns: {', '.join(row)}")
    if not isinstance(row[name], str):
        raise DataError(f"{origin}: column '{name}' holds {type(row[name]).__name__}, not a string")
    text: str = row[name]
    return text


def _checked(value: object, column: str, origin: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{origin}: column '{column}' must be a list of messages, each with a role and a content")
    messages = [_message(message, number, origin) for number, message in enumerate(value, start=1)]
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(message["role"] for message in messages)
        fix = "rename the roles to system, user, assistant and tool"
        raise DataError(f"{origin}: no message has the role assistant (roles: {roles}): nothing to learn; {fix}")
    if not any(is_trained(message) for message in answers):
        raise DataError(f"{origin}: train or weight leaves all the assistant's messages out: nothing to learn")
    return messages


def _message(message: object, number: int, origin: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{origin}: message {number} is not an object with a role (user, assistant, system, tool)")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, number, origin)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{origin}: the content of message {number} must be a string, or a list of texts")
    if content and (OPEN in content or CLOSE in content):
        raise DataError(f"{origin}: message {number} contains a Unicode noncharacter (U+FDD0 or U+FDD1)")
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"{origin}: the weight of message {number} is {message['weight']!r}; use 0 or 1")
    if not isinstance(message.get("train", True), bool):
        raise DataError(f"{origin}: train of message {number} is {message['train']!r}; use true or false")
    return {**message, "content": content}


def _joined(parts: list[object], number: int, origin: str) -> str:
    """The text of ``[{"type": "text", "text": ...}, ...]``."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{origin}: the content of message {number} has a part that is no text; leave it out")
    return "".join(str(text) for text in texts)


def as_parts(content: object) -> object:
    """A text as the list of its texts, pictures and videos, which templates of vision-language models take."""
    if not isinstance(content, str):
        return content
    first, *rest = PLACES.split(content)
    texts = [first, *(text.strip("\n") for text in rest)]
    kinds = [[], *([{"type": "video" if place == VIDEO else "image"}] for place in PLACES.findall(content))]
    several = [[*kind, {"type": "text", "text": text}] for kind, text in zip(kinds, texts, strict=True)]
    return [part for parts in several for part in parts if part.get("text") != "" or len(texts) == 1]
