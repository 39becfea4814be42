"""Conversations that earlier versions read or rendered otherwise.

Their tokens may still be in a cache, so these conversations get another identity; all others keep theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mgpu_pipe.data.files import json_row
from mgpu_pipe.data.text.conversations import (
    CONTEXT,
    EVERY_PLACE,
    FUNCTIONS,
    INPUT,
    MARKS,
    REASONING,
    SYSTEM,
    SYSTEM_PROMPT,
    TOOLS,
    first_there,
    form_of,
    has_places,
    is_bare_tool,
    is_trained,
    joins_templates,
    sides_of,
)
from mgpu_pipe.data.text.foreign_messages import (
    CALL,
    OBSERVATIONS,
    SWIFT_CALL,
    WRITTEN,
    json_value,
    small_role,
    standard_role,
    with_lists,
)
from mgpu_pipe.data.text.preference_rows import COMPLETION, PROMPTS, SIDES, is_transcript, prompt_column
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.text.render_chat import ChatTemplate

_SHAREGPT = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bard"), "assistant"), "observation": "tool"}
"""Roles that earlier versions translated, of messages with ``from``."""
ANEW, AGAIN = "anew", "again"
"""Marks of rows that were read otherwise: once, and also after the first change. Both are parts of identities."""


def mark_of(row: dict[str, Any], column: str, kind: str) -> str:
    """:data:`AGAIN` or :data:`ANEW` for a row that earlier versions read otherwise, empty for any other."""
    return AGAIN if is_read_again(row) else ANEW if is_read_anew(row, column, kind) else ""


def is_read_again(row: Mapping[str, Any]) -> bool:
    """Whether capitals in a role of a system message, a call or a tool's answer hid what it is."""
    has_system = bool(row.get(first_there(dict(row), (SYSTEM, SYSTEM_PROMPT)) or SYSTEM))
    for value in row.values():
        value = json_value(value) if isinstance(value, str) and WRITTEN.match(value) else value
        messages = [message for message in (value if isinstance(value, list) else [value]) if isinstance(message, dict)]
        has_calls, roles = any(message.get(CALL) for message in messages), [small_role(message) for message in messages]
        for number, (message, role) in enumerate(zip(messages, roles, strict=True)):
            if message.get("role", message.get("from")) in (role, None):
                continue
            if role == SWIFT_CALL or (role == "assistant" and SWIFT_CALL in roles[number + 1 : number + 2]):
                return True
            if role in (CALL, *OBSERVATIONS) and ("role" not in message or (has_calls and role == "function")):
                return True
            if number == 0 and has_system and role in (SYSTEM, "developer"):
                return True
    return False


def is_read_anew(row: dict[str, Any], column: str, kind: str) -> bool:
    """Whether columns, roles or marks of a row of a source's ``kind`` say more than in earlier versions."""
    messages = list(messages_in(row))
    has_system = any(standard_role(message) in (SYSTEM, "developer") for message in messages)
    if row.get(SYSTEM) is None and row.get(SYSTEM_PROMPT) and not has_system:
        return True
    if row.get(TOOLS) is None and row.get(FUNCTIONS):
        return True
    tools = json_value(row.get(TOOLS))
    if any(is_bare_tool(json_value(tool)) for tool in (tools if isinstance(tools, list) else [tools])):
        return True
    if row.get(INPUT) is None and row.get(CONTEXT) and any(name in row for name in ("instruction", "question")):
        return True
    answers = [] if kind == "chat" else [row.get(name) for name in (*SIDES, COMPLETION)]
    before = first_there(row, (column, *PROMPTS))
    if any(map(_continues_prompt, answers)) and prompt_column(row, column) != before:
        return True
    if kind != "chat" and is_transcript(row.get(before or column)):
        return True
    if _holds_written_lists(row, column, kind):
        return True
    return any(map(_has_new_fields, messages))


def _holds_written_lists(row: dict[str, Any], column: str, kind: str) -> bool:
    """Whether columns hold lists of messages as texts; earlier versions trained such texts unchanged."""
    if kind == "chat" and form_of(row, column) != "prompt_completion":
        return False
    answers = sides_of(row) if kind == "chat" else [name for name in (*SIDES, COMPLETION) if name in row]
    try:
        return with_lists(row, answers, () if kind == "chat" else (column, *PROMPTS), "") != row
    except DataError:  # printed by Python
        return True


def _row(line: str, column: str) -> dict[str, Any]:
    """A line as :func:`json_row` parses it; empty for a broken line."""
    try:
        return json_row(line, "", column)
    except DataError:
        return {}


def messages_in(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the messages in the columns of a row, of any form."""
    for value in row.values():
        for message in value if isinstance(value, list) else [value]:
            if isinstance(message, dict) and ("role" in message or "from" in message):
                yield message


def _continues_prompt(answer: object) -> bool:
    """Whether an answer stands after a prompt of another column."""
    first = answer[0] if isinstance(answer, list) and answer else answer
    return isinstance(first, str) or (isinstance(first, dict) and standard_role(first) == "assistant")


def _has_new_fields(message: Mapping[str, Any]) -> bool:
    role = standard_role(message)
    before = str(message["role"]) if "role" in message else _SHAREGPT.get(str(message["from"]), str(message["from"]))
    if role == "assistant" and message.get(MARKS[0]) is not False and message.get("weight") != 0:
        return role != before or not is_trained(message)
    return role != before


def is_rendered_anew(template: ChatTemplate, conversations: Iterable[str], column: str) -> bool:
    """Whether the template renders any of the JSON lines otherwise than in earlier versions."""
    if template.writes_after_turn():
        return True
    reads = [name for name in REASONING[:2] if re.search(rf"[.'\"]{name}\b", template.source)]
    spells = template.reads_parts and not template.places
    joins = joins_templates(template.source)
    if not (reads or spells or joins):
        return False
    words = [*(REASONING if reads else ()), *(EVERY_PLACE if spells else ()), *((TOOLS, FUNCTIONS) if joins else ())]
    for line in conversations:
        if any(word in line for word in words):
            row = _row(line, column)
            if joins and (row.get(TOOLS) or row.get(FUNCTIONS)):
                return True
            for message in messages_in(row):
                if any(not message.get(name) for name in reads) and any(map(message.get, REASONING)):
                    return True
                said = {"role": standard_role(message), "content": message.get("content", message.get("value"))}
                if spells and has_places(said):
                    return True
    return False
