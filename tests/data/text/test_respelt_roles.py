"""Roles in capitals are the roles in small letters, wherever a role decides how a row is read."""

from __future__ import annotations

from typing import Any

import pytest

from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.errors import DataError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = '{"name": "f", "arguments": {}}'


def capitalize_roles(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("role", "from")
    return [{**message, **{name: message[name].title() for name in names if name in message}} for message in messages]


@pytest.mark.parametrize("role", ["system", "System", " DEVELOPER", "Developer"])
def test_a_system_prompt_is_compared_with_a_system_message_of_any_spelling(role: str) -> None:
    messages = [{"role": role, "content": "s"}, USER, ANSWER]
    assert len(messages_of({"system": "s", "messages": messages}, "row", "messages")) == 3
    with pytest.raises(DataError, match="different system messages"):
        messages_of({"system": "another", "messages": messages}, "row", "messages")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {"role": "assistant", "content": "a"}, {"role": "tool_call", "content": CALL}]},
        {"messages": [USER, {"role": "tool_call", "content": CALL}, {"role": "tool_response", "content": "r"}, ANSWER]},
        {"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}, {"role": "function", "content": "r"}]},
        {
            "conversations": [
                *({"from": "human", "value": "q"}, {"from": "function_call", "value": CALL}),
                *({"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"}),
            ]
        },
    ],
)
def test_calls_and_observations_in_capitals_are_what_they_are_in_small_letters(row: dict[str, Any]) -> None:
    respelt = {column: capitalize_roles(messages) for column, messages in row.items()}
    assert messages_of(respelt, "row", "messages") == messages_of(row, "row", "messages")
