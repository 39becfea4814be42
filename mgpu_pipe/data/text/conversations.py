"""Converts rows of the usual forms of conversations to lists of messages.

The forms are those of OpenAI and transformers (``messages``), ShareGPT, Stanford Alpaca, and prompt and completion
under any of their usual names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mgpu_pipe.data.files import FIX, TOKEN_IDS, missing_column
from mgpu_pipe.data.text.foreign_messages import (
    GEMINI,
    foreign_text,
    json_value,
    row_of_gemini,
    standard_role,
    usual_messages,
    with_lists,
)
from mgpu_pipe.errors import DataError

SYSTEM, TOOLS, HISTORY, INPUT = "system", "tools", "history", "input"
SYSTEM_PROMPT, FUNCTIONS, CONTEXT, FUNCTION = "system_prompt", "functions", "context", "function"
"""Other names of the columns ``system`` (Orca), ``tools`` (OpenAI before tools) and ``input`` (Dolly)."""
_TEMPLATE_JOINTS = ("{% if tools %}\n", "{{ '' }}{% else %}\n", "{{ '' }}{% endif %}")
"""Texts around two templates in one. Blocks trim the newline after them, and spaces before them on a line."""
BESIDE = (SYSTEM, SYSTEM_PROMPT, TOOLS, FUNCTIONS)
"""Columns that every form reads."""


def joined_templates(with_tools: str, others: str) -> str:
    """A template that renders conversations with tools by the first of two, others by the second."""
    parts = (re.sub(r"(\r\n|\r|\n)\Z", "", template) for template in (with_tools, others))  # as Jinja does
    return _TEMPLATE_JOINTS[0] + _TEMPLATE_JOINTS[1].join(parts) + _TEMPLATE_JOINTS[2]


def joins_templates(source: str) -> bool:
    """Whether a template is one of :func:`joined_templates`."""
    return source.startswith(_TEMPLATE_JOINTS[0]) and source.endswith(_TEMPLATE_JOINTS[2])


def system_before(messages: list[Any], row: dict[str, Any], origin: str) -> list[Any]:
    """Prepends the row's system message; DataError if it has another type, or the messages another one."""
    name = first_there(row, (SYSTEM, SYSTEM_PROMPT)) or SYSTEM
    system = optional_text({name: foreign_text(row.get(name))}, name, origin)
    if not system.strip():
        return messages
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if standard_role(first) in (SYSTEM, "developer"):
        if str(first.get("content", first.get("value"))).strip() != system.strip():
            raise DataError(f"{origin}: column '{name}' and the first message are different system messages; {FIX}")
        return messages
    return [{"role": SYSTEM, "content": system}, *messages]


def history_of(row: dict[str, Any], origin: str) -> list[Any]:
    """Turns before a row's question, from pairs (Alpaca) or messages; DataError for another type."""
    history = row.get(HISTORY)
    if history is None or history == "":
        return []
    turns: list[Any] = []
    for turn in history if isinstance(history, list) else [None]:
        if isinstance(turn, dict):
            turns.append(turn)
        elif isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
        else:
            raise DataError(f"{origin}: column '{HISTORY}' must be a list of pairs of a question and an answer; {FIX}")
    return turns


def question_of(row: dict[str, Any], name: str, origin: str) -> str:
    """Text of a column, followed by that of ``input`` or ``context``."""
    extra = first_there(row, [other for other in (INPUT, CONTEXT) if other != name])
    parts = text_of(row, name, origin), optional_text(row, extra, origin) if extra else ""
    return "\n\n".join(filter(None, parts))


def tools_of(row: dict[str, Any], origin: str) -> list[Any] | None:
    """Tools of a row as objects, parsed where needed, or None; DataError for another type."""
    tools = json_value(row.get(TOOLS))
    if tools is None and isinstance(functions := json_value(row.get(FUNCTIONS)), list):
        tools = [{"type": "function", "function": json_value(function)} for function in functions]
    tools = [tools] if tools and isinstance(tools, dict) else tools
    if not tools and not isinstance(tools, int | float):
        return None
    listed: list[Any] = [json_value(tool) for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(tool, dict) for tool in listed):
        raise DataError(f"{origin}: column '{TOOLS}' must be a list of objects, or a JSON string of one; {FIX}")
    return [_whole_tool(tool) for tool in listed]


def _whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of OpenAI's chats, which templates read; LLaMA-Factory's and xLAM's rows have its function."""
    if not is_bare_tool(tool):
        return tool
    return {"type": FUNCTION, FUNCTION: {name: value for name, value in tool.items() if name != "type"}}


def is_bare_tool(tool: object) -> bool:
    """Whether a tool is only the function of one."""
    if not isinstance(tool, dict) or FUNCTION in tool:
        return False
    return isinstance(tool.get("name"), str) and tool.get("type") in (None, FUNCTION)


def calls_of(value: object, number: int, origin: str) -> list[Any] | None:
    """Tool calls of message ``number``, objects with names, or None; DataError for other types."""
    calls = json_value(value)
    calls = [calls] if calls and isinstance(calls, dict) else calls
    if not calls and not isinstance(calls, int | float):
        return None
    listed: list[Any] = [json_value(call) for call in calls] if isinstance(calls, list) else [None]
    for call in listed:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{origin}: tool_calls of message {number} must be a list of objects with a name; {FIX}")
        arguments = json_value(function.get("arguments"))
        if arguments is not None and not isinstance(arguments, dict):
            subject = f"the arguments of {function['name']!r} in message {number}"
            raise DataError(f"{origin}: {subject} must be an object, or a JSON string of one; {FIX}")
    return [
        {
            name: _without_nulls(field) if name == "function" and isinstance(field, dict) else field
            for name, field in _without_nulls(call).items()
        }
        for call in listed
    ]


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that have a value. Parquet has all fields in all messages, and a template may ask whether one is there."""
    return {name: value for name, value in fields.items() if value is not None}


def unused_columns(row: dict[str, Any], read: Iterable[str]) -> list[str]:
    """Columns of a row that nothing reads (``meta.chat`` reads the column ``meta``)."""
    known = {part for name in read for part in (name, name.partition(".")[0])}
    return [name for name in row if name not in known]


def text_of(row: dict[str, Any], name: str, origin: str) -> str:
    """Returns the text of a column; DataError without one."""
    if name not in row:
        raise DataError(f"{origin}: no column '{name}', which data.format needs; columns: {', '.join(row)}")
    if not isinstance(row[name], str):
        raise DataError(f"{origin}: column '{name}' holds {type(row[name]).__name__}, not a string")
    text: str = row[name]
    return text


def optional_text(row: dict[str, Any], name: str, origin: str) -> str:
    """Reads like :func:`text_of`; empty where the column is missing or empty."""
    return "" if row.get(name) is None else text_of(row, name, origin)


def first_there(row: dict[str, Any], names: Sequence[str]) -> str | None:
    """First of these columns that is not empty."""
    return next((name for name in names if row.get(name) is not None), None)


PLACE, VIDEO, AUDIO = "<image>", "<video>", "<audio>"
"""Placeholder tokens of a picture, of a video and of a recording in a conversation."""
EVERY_PLACE = (PLACE, VIDEO, AUDIO)
PLACES = re.compile("|".join(EVERY_PLACE))
OPEN, CLOSE, SEEN, LITERAL = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Unicode noncharacters, which no text contains, as marks in a rendering. The third one marks a content. The last one
stands after the first character of a text that spells a token and stays text."""
MESSAGES = "messages"
"""Default of ``data.messages_column``. Rows without it are of other forms; rows without another name are broken."""
SHAREGPT, ALPACA, COMPLETION = "conversations", ("instruction", "output"), ("prompt", "completion")
"""Columns that identify the forms."""
_QUESTIONS = ("prompt", "instruction", "question", "query", INPUT)
_ANSWERS = ("completion", "output", "response", "answer")
"""Names of a prompt and of its completion, in the order in which they are looked for."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for the reasoning of a message; transformers shows it to templates as the first two."""
MARKS = ("train", "training", "train_on_turn", "loss")
"""Fields of a message that say by true or false whether the loss counts it (Axolotl, ms-swift)."""
DETAILS = ("train_detail", "training_detail")
"""Fields with marks of parts of a message (Axolotl)."""


def messages_of(row: dict[str, Any], origin: str, column: str, form: str = "auto") -> list[dict[str, Any]]:
    """Converts one row to messages, each an object with a role and a content.

    Args:
        column: of the messages, ``data.messages_column``.
        form: ``data.format``; auto goes by the row's columns.

    Raises:
        DataError: the row is broken; names ``origin``.
    """
    row = row_of_gemini(row, column)
    form = form_of(row, column, form)
    if form == "alpaca":
        return _check(system_before(_alpaca(row, origin), row, origin), "instruction", origin)
    if form == "prompt_completion":
        row = with_lists(row, sides_of(row), (), origin)
        return _check(system_before(_completion(row, origin), row, origin), "prompt", origin)
    if column not in row and form == "sharegpt":
        column = SHAREGPT
    if column not in row:
        lists = [name for name, value in row.items() if isinstance(value, list) and _is_talk(value)]
        lists = lists if column == MESSAGES and TOKEN_IDS not in row else list(row)
        if lists:
            raise missing_column(origin, "data.messages_column", column, lists)
        forms = f"{SHAREGPT}, {' and '.join(ALPACA)}, or {' and '.join(COMPLETION)}"
        fix = "rename its columns, or write the conversation as 'messages', each with a role and a content"
        fix = "pairs are read by data=preferences_jsonl" if row.keys() >= {"chosen", "rejected"} else fix
        raise DataError(f"{origin}: has no column '{column}' (nor {forms}) but {', '.join(row) or 'none'}; {fix}")
    value = json_value(row[column])
    if isinstance(value, list) and value:
        value = system_before(spoken_in_turns(value), row, origin)
    return _check(value, column, origin)


def spoken_in_turns(value: list[Any]) -> list[Any]:
    """The messages of a list of texts (UltraChat's form), of which the user says the first; any other unchanged."""
    if not all(isinstance(message, str) for message in value):
        return value
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(value)]


def _is_talk(value: list[Any]) -> bool:
    """Whether a list holds messages or texts, not numbers or other objects such as Axolotl's segments."""
    first = value[0] if value else None
    return isinstance(first, str) or (isinstance(first, dict) and bool(first.keys() & {"role", "from"}))


def columns_read(row: dict[str, Any], column: str, form: str = "auto") -> list[str]:
    """Columns of a row that become messages; arguments of :func:`messages_of`."""
    gemini = [] if row_of_gemini(row, column) is row else GEMINI
    form = form_of(row, column, form)
    if form == "alpaca":
        return [*BESIDE, *ALPACA, INPUT, HISTORY]
    if form == "prompt_completion":
        question, answer = sides_of(row)
        more = [HISTORY] if isinstance(row.get(question), str) else []
        more += [INPUT, CONTEXT] if question != "prompt" else []
        return [*BESIDE, question, answer, *more]
    return [*BESIDE, *gemini, SHAREGPT if column not in row and form == "sharegpt" else column]


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether the loss counts this assistant message: no if its ``weight`` or one of :data:`MARKS` says so."""
    return all(message.get(name) is not False for name in MARKS) and message.get("weight") != 0


def form_of(row: dict[str, Any], column: str, form: str = "auto") -> str:
    """Form of a row, from ``data.format`` or its columns."""
    if form != "auto":
        return form
    if column in row or column != MESSAGES:
        return "messages"
    if SHAREGPT in row:
        return "sharegpt"
    if all(name in row for name in ALPACA):
        return "alpaca"
    return "prompt_completion" if all(name in row for name in sides_of(row)) else "messages"


def sides_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Names of a row's columns of the prompt and of the completion."""
    question = next((name for name in _QUESTIONS if name in row), COMPLETION[0])
    return question, next((name for name in _ANSWERS if name in row), COMPLETION[1])


def _alpaca(row: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    question, answer = question_of(row, ALPACA[0], origin), text_of(row, ALPACA[1], origin)
    turns = [("user", question), ("assistant", answer)]
    return [*history_of(row, origin), *({"role": role, "content": text} for role, text in turns)]


def _completion(row: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    names = sides_of(row)
    sides = history_of(row, origin) if isinstance(row.get(names[0]), str) else []
    for name, role in zip(names, ("user", "assistant"), strict=True):
        if isinstance(row.get(name), list):
            sides += row[name]
            continue
        plain = role == "assistant" or name == COMPLETION[0]
        sides.append({"role": role, "content": (text_of if plain else question_of)(row, name, origin)})
    return sides


def prompt_messages(value: object, column: str, origin: str) -> list[dict[str, Any]]:
    """Converts the value of ``column`` to messages without an answer; DataError names ``origin`` if it holds none."""
    if not isinstance(value, list) or not value:
        fix = "; its text is no JSON: write it by json.dumps" if isinstance(value, str) else ""
        raise DataError(f"{origin}: column '{column}' must be a list of messages, each with a role and a content{fix}")
    return [_message(message, number, origin) for number, message in enumerate(usual_messages(value), start=1)]


def _check(value: object, column: str, origin: str) -> list[dict[str, Any]]:
    messages = prompt_messages(value, column, origin)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(message["role"] for message in messages)
        fix = "rename the roles to system, user, assistant and tool"
        raise DataError(f"{origin}: no message has the role assistant (roles: {roles}): nothing to learn; {fix}")
    if not any(is_trained(message) for message in answers):
        raise DataError(
            f"{origin}: {', '.join(MARKS)} or weight leaves all the assistant's messages out: nothing to learn"
        )
    return messages


def _message(message: object, number: int, origin: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        fields = f"; rename its fields to role and content: {', '.join(message)}" if isinstance(message, dict) else ""
        raise DataError(
            f"{origin}: message {number} is not an object with a role (user, assistant, system, tool){fields}"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = _join(content, number, origin)
    if "tool_calls" in message:
        calls = calls_of(message["tool_calls"], number, origin)
        message = {name: value for name, value in message.items() if name != "tool_calls"}
        message |= {} if calls is None else {"tool_calls": calls}
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        fields = "" if content is not None else f"; its fields: {', '.join(message)}"
        raise DataError(f"{origin}: the content of message {number} must be a string, or a list of texts{fields}")
    if content and any(mark in content for mark in (OPEN, CLOSE, SEEN)):
        raise DataError(f"{origin}: message {number} contains a Unicode noncharacter (U+FDD0 to U+FDD2)")
    if message.get("weight") not in (0, 1, None):
        raise DataError(f"{origin}: the weight of message {number} is {message['weight']!r}; use 0 or 1")
    if name := next((name for name in MARKS if message.get(name) not in (True, False, None)), None):
        raise DataError(f"{origin}: {name} of message {number} is {message[name]!r}; use true or false")
    if name := next((name for name in DETAILS if message.get(name)), None):
        raise DataError(f"{origin}: {name} of message {number} marks parts of it; mark whole messages")
    marks = {name: bool(message[name]) for name in MARKS if message.get(name) is not None}
    return {**_without_nulls(message), **marks, "role": standard_role(message), "content": content}


_TEXTS = (None, "text", "input_text", "output_text")
"""Types of a content's parts that are texts: none in Bedrock and Gemini, the last two in OpenAI's Responses."""


def _join(parts: list[object], number: int, origin: str) -> str:
    """Joins the texts of ``[{"type": "text", "text": ...}, ...]``."""
    if any(part.get(name) is not None for part in parts if isinstance(part, dict) for name in (*MARKS, "weight")):
        raise DataError(f"{origin}: a part of message {number} has a mark of its own; mark whole messages")
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{origin}: the content of message {number} has a part that is no text; leave it out")
    return "".join(str(text) for text in texts)


def write_literally(text: str, tokens: Iterable[str]) -> str:
    """``text`` in which ``tokens`` stay text; the tokenizer makes no token of one."""
    for token in tokens:
        text = text.replace(token, f"{token[0]}{LITERAL}{token[1:]}")
    return text


def has_places(message: Mapping[str, Any], places: Collection[str] = EVERY_PLACE) -> bool:
    """Whether a message to the assistant is a text with some of these places."""
    content = message.get("content")
    return message.get("role") == "user" and isinstance(content, str) and any(place in content for place in places)


def as_parts(content: object, places: Collection[str] = EVERY_PLACE) -> object:
    """Splits a text into parts (texts, and pictures, videos or recordings at ``places``) for templates."""
    if not isinstance(content, str):
        return content
    first, *rest = re.split("|".join(places), content) if places else [content]
    texts = [first, *(text.strip("\n") for text in rest)]
    kinds = [[], *([{"type": place.strip("<>")}] for place in PLACES.findall(content) if place in places)]
    several = [[*kind, {"type": "text", "text": text}] for kind, text in zip(kinds, texts, strict=True)]
    return [part for parts in several for part in parts if part.get("text") != "" or len(texts) == 1]
