"""Arguments of tool calls in the form that a chat template expects: an object, or a JSON string.

OpenAI's rows have a JSON string. Most templates (Qwen, Llama 3.1) write ``arguments | tojson``, which would quote a
string again; some (DeepSeek) concatenate it, which fails for an object. A trial rendering finds the form of a template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mgpu_pipe.data.text.conversations import SEEN
from mgpu_pipe.data.text.foreign_messages import json_value

Form = Literal["object", "string"]
_ARGUMENTS = {"of": SEEN}


def form_taken(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> Form | None:
    """Form of arguments that a template renders right ("" if refused); None if it renders both alike, or neither."""
    text = json.dumps(_ARGUMENTS, ensure_ascii=False)
    # Neither Python's form of an object nor a doubly quoted string contains the text.
    of_object, of_string = _render_call(render, _ARGUMENTS), _render_call(render, text)
    if of_object == of_string:
        return None
    return "object" if SEEN in of_object else "string" if text in of_string else None


def _render_call(render: Callable[[Sequence[Mapping[str, Any]]], str], arguments: object) -> str:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function, **function}
    question, text = {"role": "user", "content": "."}, ""
    for content in (None, ""):  # some templates accept only one of them
        text = render([question, {"role": "assistant", "content": content, "tool_calls": [call]}])
        if SEEN in text:
            break
    return text


def with_arguments(messages: Sequence[Mapping[str, Any]], form: Form) -> list[Mapping[str, Any]]:
    """``messages`` with the arguments of tool calls in this form; empty ones become an empty object."""
    changed = list[Mapping[str, Any]]()
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_arguments(call, form) for call in calls]}
        changed.append(message)
    return changed


def _with_arguments(call: Any, form: Form) -> Any:
    """Converts a call, ``{"function": {"name": ..., "arguments": ...}}`` or only the inner object."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], form)}
    if "arguments" not in call:
        return call
    arguments = json_value(call["arguments"])
    arguments = {} if arguments is None else arguments
    if form == "string" and not isinstance(call["arguments"], str):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**call, "arguments": arguments} if form == "object" else call
