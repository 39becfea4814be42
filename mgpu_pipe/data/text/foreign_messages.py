"""Messages as other programs write them, under the usual names.

The forms are those of ShareGPT (``from``, ``value``), OpenAI before ``tool_calls`` (``function_call``), ms-swift
(``tool_call``, ``tool_response``), and Gemini (``contents`` with ``parts``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mgpu_pipe.errors import DataError

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
CALL, SWIFT_CALL = "function_call", "tool_call"
"""Roles of a message with the assistant's tool calls as JSON: ShareGPT's, which is also OpenAI's field of a call before
``tool_calls``, and ms-swift's."""
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "ai", "bot", "chatbot", "model", SWIFT_CALL), "assistant"),
    "tool_response": "tool",
}
"""Standard roles by other names, in small letters."""
OBSERVATIONS = ("observation", "function")
"""ShareGPT's roles of a tool's answer, which some templates of ``messages`` write as they are."""
GEMINI = ("contents", "systemInstruction", "system_instruction")
"""Columns of Gemini's rows."""
WRITTEN = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content|from|value)\1\s*:.*\]\s*\Z""", re.DOTALL)
"""A list of messages as a text: JSON, or what Python prints."""


def standard_role(message: Mapping[str, Any]) -> str:
    """Role of a message of any form by its standard name; another name unchanged."""
    name, small = str(message.get("role", message.get("from"))), small_role(message)
    if "role" not in message and small in OBSERVATIONS:
        return "tool"
    return ROLES.get(small, small if small in KNOWN_ROLES else name)


def small_role(message: Mapping[str, Any]) -> str:
    """Role of a message as it is written, in small letters."""
    return str(message.get("role", message.get("from"))).strip().lower()


def usual_messages(messages: Iterable[object]) -> list[object]:
    """Messages of any form as objects with a role and a content. Calls after an answer become part of it (ms-swift)."""
    said = [_usual_names(message) for message in messages]
    if any(isinstance(message, dict) and message.get(CALL) for message in said):
        said = [_with_call(message) if isinstance(message, dict) else message for message in said]
    joined = list[object]()
    for message in said:
        if not isinstance(message, dict) or small_role(message) != SWIFT_CALL:
            joined.append(message)
            continue
        before = joined[-1] if joined else None
        call = message.get("content") or SWIFT_CALL
        if isinstance(before, dict) and small_role(before) in ("assistant", SWIFT_CALL):
            calls = json_value(before.get("tool_calls")) or []
            joined[-1] = {**before, "tool_calls": [*(calls if isinstance(calls, list) else [calls]), call]}
        else:
            joined.append({**message, "content": None, "tool_calls": [call]})
    return joined


def json_value(value: object) -> Any:
    """Parses a string of JSON; returns any other value unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value if not isinstance(value, str) else None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _usual_names(message: object) -> object:
    """Converts ``{"from": ..., "value": ...}`` and ``{"role": ..., "parts": ...}`` to a role and a content."""
    if not isinstance(message, dict):
        return message
    if "role" in message:
        names = {"parts": "content"} if "content" not in message else {}
        return {names.get(name, name): value for name, value in message.items()}
    if "from" not in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    small = small_role(message)
    if small == CALL:
        return {"role": "assistant", "content": None, "tool_calls": message.get("value") or CALL, **rest}
    role = "tool" if small in OBSERVATIONS else message["from"]
    return {"role": role, "content": message.get("value"), **rest}


def _with_call(message: dict[str, Any]) -> dict[str, Any]:
    """Converts OpenAI's call and answer of a function, the form before ``tool_calls``."""
    rest = {name: value for name, value in message.items() if name != CALL}
    if message.get(CALL):
        rest["tool_calls"] = [{"type": "function", "function": message[CALL]}]
    return {**rest, "role": "tool"} if small_role(message) == "function" else rest


def with_lists(row: dict[str, Any], answers: Sequence[str], prompts: Iterable[str], origin: str) -> dict[str, Any]:
    """``row`` with lists of messages that it holds as JSON texts; DataError for lists that Python printed.

    Args:
        answers: columns that are parsed where all of them hold such a text.
        prompts: columns that are parsed each by itself.
    """
    written = {name for name, value in row.items() if isinstance(value, str) and WRITTEN.match(value)}
    names = [*written.intersection(prompts), *(answers if written.issuperset(answers) else ())]
    lists = {name: json_value(row[name]) for name in names}
    if printed := next((name for name, value in lists.items() if isinstance(value, str)), None):
        raise DataError(
            f"{origin}: column '{printed}' holds messages as a text that is no JSON; write it by json.dumps"
        )
    return {**row, **lists}


def row_of_gemini(row: dict[str, Any], column: str) -> dict[str, Any]:
    """A row of Gemini's form with its messages in ``column``; any other row unchanged."""
    contents = row.get(GEMINI[0])
    if column in row or not isinstance(contents, list):
        return row
    if not all(isinstance(message, dict) and "parts" in message for message in contents):
        return row
    system = next((row[name] for name in GEMINI[1:] if row.get(name)), None)
    rest = {name: value for name, value in row.items() if name not in GEMINI}
    written = system.get("parts") if isinstance(system, dict) else system
    return {**rest, column: contents, **({} if written is None else {"system": written})}


def foreign_text(value: object) -> object:
    """The text of a list of ``{"text": ...}`` (Bedrock, Gemini); any other value unchanged."""
    parts = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return value
    return "\n\n".join(part["text"] for part in parts)
