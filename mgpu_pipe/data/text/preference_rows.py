"""Converts rows of answers: a chosen and a rejected answer to two conversations, a labelled answer to a conversation.

The forms are TRL's (``prompt``, ``chosen`` and ``rejected``, each a text or a list of messages), UltraFeedback's, with
whole conversations as ``chosen`` and ``rejected``, HH-RLHF's, with whole transcripts, OpenAI's, and rows with
``system``, ``question`` or ``instruction``. A labelled answer has TRL's form: ``prompt``, ``completion`` and ``label``;
or it ends a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mgpu_pipe.data.files import FIX, missing_column
from mgpu_pipe.data.text.conversations import (
    BESIDE,
    CONTEXT,
    HISTORY,
    INPUT,
    SYSTEM,
    SYSTEM_PROMPT,
    first_there,
    history_of,
    is_trained,
    messages_of,
    question_of,
    system_before,
    unused_columns,
)
from mgpu_pipe.data.text.foreign_messages import WRITTEN, json_value, standard_role, with_lists
from mgpu_pipe.errors import ConfigError, DataError

Messages = list[dict[str, Any]]
SIDES = ("chosen", "rejected")
OF_OPENAI = ("preferred_output", "non_preferred_output")
"""Columns of OpenAI's pairs; their ``input`` holds messages and tools."""
RESPONSES = {"chosen_response": "chosen", "rejected_response": "rejected"}
"""Columns of the answers in pairs of Argilla and NeMo."""
OF_SWIFT = ("rejected_response", "rejected_messages")
"""Columns of the rejected answer in ms-swift's pairs, whose ``messages`` end with the chosen answer."""
SHOWN = 40
"""Characters of a prompt in an error message."""
PROMPTS = ("prompt", "messages", "conversations", "instruction", "question")
"""Columns of the prompt in rows without ``data.messages_column``."""


def usual_pair(row: dict[str, Any]) -> dict[str, Any]:
    """A row of OpenAI's, Argilla's, NeMo's or ms-swift's form under the usual names; any other row unchanged."""
    if row.keys() >= RESPONSES.keys() and not row.keys() & {*SIDES}:
        return {RESPONSES.get(name, name): value for name, value in row.items()}
    rejected, messages = first_there(row, OF_SWIFT), row.get(PROMPTS[1])
    if rejected and isinstance(messages, list) and len(messages) > 1 and not row.keys() & {*RESPONSES.values()}:
        whole = rejected == OF_SWIFT[1]
        rest = {name: value for name, value in row.items() if name not in (rejected, PROMPTS[1])}
        rest |= {} if whole else {PROMPTS[1]: messages[:-1]}
        return {**rest, SIDES[0]: messages if whole else messages[-1:], SIDES[1]: row[rejected]}
    prompt = row.get(INPUT)
    if not isinstance(prompt, dict) or not all(name in row for name in OF_OPENAI):
        return row
    rest = {name: value for name, value in row.items() if name not in (INPUT, *OF_OPENAI)}
    return {**rest, **prompt, **dict(zip(SIDES, (row[name] for name in OF_OPENAI), strict=True))}


def preference_of(row: dict[str, Any], origin: str, column: str) -> tuple[Messages, Messages]:
    """Converts a row to its two conversations; messages after the shared ones are trained.

    Args:
        column: ``data.messages_column``, the prompt as a list of messages.

    Raises:
        ConfigError: the column is an answer's.
        DataError: the row is broken; names ``origin``.
    """
    if column in SIDES:
        raise ConfigError("data.messages_column", column, "name the column of the prompt", "holds an answer")
    row = with_lists(usual_pair(row), SIDES, (column, *PROMPTS), origin)
    _require_prompt(row, column, origin)
    whole = [conversation_of(row, side, origin, column) for side in SIDES]
    shared = 0
    while shared < min(map(len, whole)) - 1 and whole[0][shared] == whole[1][shared]:
        shared += 1
    if not shared:
        raise DataError(f"{origin}: chosen and rejected do not begin with the same message; {FIX}")
    for side, messages in zip(SIDES, whole, strict=True):
        messages[:shared] = [{**message, "train": False} for message in messages[:shared]]
        if not any(message["role"] == "assistant" and is_trained(message) for message in messages):
            raise DataError(f"{origin}: {side} holds no answer of the assistant's; {FIX}")
    return whole[0], whole[1]


def _require_prompt(row: dict[str, Any], column: str, origin: str) -> None:
    """Refuses a row without the column that ``data.messages_column`` names, unless it is a usual name."""
    if column not in (*row, *PROMPTS):
        others = [name for name in row if name not in (*SIDES, COMPLETION, LABEL, TAG)]
        raise missing_column(origin, "data.messages_column", column, others)


def prompt_of(conversation: Messages) -> str:
    """The common part of a pair of conversations as one text: equal for all pairs of a prompt."""
    shared = [(message["role"], message["content"]) for message in conversation if message.get("train") is False]
    return json.dumps(shared)


def conversation_of(row: dict[str, Any], side: str, origin: str, column: str) -> Messages:
    """Conversation that ends with the answer in ``side``, of any form; DataError if a part is missing or broken."""
    if side not in row:
        raise _missing(side, row, origin)
    answer = row[side]
    if isinstance(answer, str):
        if not answer:
            raise DataError(f"{origin}: column '{side}' is empty; {FIX}")
        name = prompt_column(row, column)
        if name is None or is_transcript(row[name]):
            answer = _transcript(answer) or [{"role": "assistant", "content": answer.strip()}]
        else:
            answer = [{"role": "assistant", "content": answer}]
    elif isinstance(answer, dict):
        answer = [answer]
    if not isinstance(answer, list) or not answer or not isinstance(answer[0], dict):
        raise DataError(f"{origin}: column '{side}' must be a text or a list of messages; {FIX}")
    if standard_role(answer[0]) == "assistant":
        answer = [*_prompt(row, origin, column), *answer]
    else:
        _check_prompt(row, answer, side, origin, column)
    return messages_of({side: system_before(answer, row, origin)}, origin, side, "messages")


def _transcript(text: str) -> list[Any]:
    """Messages of a transcript of HH-RLHF's form; empty for another text."""
    before, *turns = re.split(r"(?:^|\n\n)(Human|Assistant):", text)
    if before.strip() or not turns:
        return []
    return [{"role": role, "content": said.strip()} for role, said in zip(turns[::2], turns[1::2], strict=True)]


def is_transcript(prompt: object) -> bool:
    """Whether a prompt is a transcript of HH-RLHF's form that the assistant is to continue."""
    return isinstance(prompt, str) and prompt.rstrip().endswith("\n\nAssistant:") and bool(_transcript(prompt))


def prompt_column(row: dict[str, Any], column: str) -> str | None:
    """The first column that holds a prompt. A conversation that ends with an answer is no prompt."""

    def is_prompt(value: Any) -> bool:
        last = value[-1] if isinstance(value, list) and value else None
        return value is not None and not (isinstance(last, dict) and standard_role(last) == "assistant")

    return next((name for name in (column, *PROMPTS) if is_prompt(row.get(name))), None)


def _check_prompt(row: dict[str, Any], conversation: list[Any], side: str, origin: str, column: str) -> None:
    """Refuses a prompt that the whole conversation next to it does not contain."""
    if (name := prompt_column(row, column)) is None:
        return
    said = _users_texts(conversation)
    if missing := next((text for text in _users_texts(_prompt(row, origin, column)) if text not in said), None):
        excerpt = missing if len(missing) <= SHOWN else f"{missing[:SHOWN]}..."
        raise DataError(f"{origin}: no message of {side} is column {name!r} ({excerpt!r}); {FIX}")


def _users_texts(messages: list[Any]) -> list[str]:
    """Joins the user's texts in messages of any form."""
    users = (message for message in messages if isinstance(message, dict) and standard_role(message) == "user")
    texts = (message.get("content", message.get("value")) for message in users)
    return [text.strip() for text in texts if isinstance(text, str)]


def preference_columns(column: str) -> list[str]:
    """Columns that become pairs."""
    return [*BESIDE, *SIDES, *OF_OPENAI, *RESPONSES, *OF_SWIFT, column, *PROMPTS, INPUT, CONTEXT, HISTORY]


def unread_columns(row: dict[str, Any], known: Sequence[str], messages: Messages) -> list[str]:
    """Columns of a row that are not among the ``known``, or hold a text that is in none of its messages."""
    said = "\n".join(str(message["content"]) for message in messages)
    texts = (SYSTEM, SYSTEM_PROMPT, *PROMPTS, INPUT, CONTEXT, HISTORY)
    lost = [name for name in texts if any(text.strip() not in said for text in _texts_in(row.get(name)))]
    return [*unused_columns(row, known), *(name for name in lost if name in known)]


def _texts_in(value: object) -> Iterator[str]:
    """Yields the texts of a column: of a transcript, of messages, of pairs."""
    if isinstance(value, str):
        turns = _transcript(value) if is_transcript(value) else json_value(value) if WRITTEN.match(value) else value
        yield from [turns] if isinstance(turns, str) else _texts_in(turns)
    for part in value if isinstance(value, list) else []:
        yield from _texts_in(part.get("content", part.get("value")) if isinstance(part, dict) else part)


def _prompt(row: dict[str, Any], origin: str, column: str) -> list[Any]:
    name = prompt_column(row, column)
    if name is None and (answered := next((name for name in (column, *PROMPTS) if row.get(name) is not None), None)):
        raise DataError(f"{origin}: the prompt in column '{answered}' ends with an answer; leave the answer out of it")
    if name is None:
        others = [name for name in row if name not in (*SIDES, *BESIDE)]
        fix = f"set data.messages_column to its column: {', '.join(others)}" if others else "add a column 'prompt'"
        raise DataError(f"{origin}: has no prompt (no column {', '.join(dict.fromkeys((column, *PROMPTS)))}); {fix}")
    prompt = row[name]
    if is_transcript(prompt):
        return _transcript(prompt)[:-1]
    if isinstance(prompt, str):
        text = question_of(row, name, origin) if name == "instruction" else prompt
        return [*history_of(row, origin), {"role": "user", "content": text}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{origin}: the prompt must be a text or a list of messages; {FIX}")
    return prompt


COMPLETION, LABEL, TAG = "completion", "label", "kto_tag"
"""The last is LLaMA-Factory's name of the label."""
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
    _require_prompt(row, column, origin)
    row = _with_completion(with_lists(row, (COMPLETION,), (column, *PROMPTS), origin), column)
    if LABEL not in row:
        raise _missing(LABEL, row, origin)
    written = row[LABEL]
    label = written.lower() if isinstance(written, str) else written
    if not isinstance(label, (bool, int, float, str)) or label not in LABELS:
        raise DataError(f"{origin}: column '{LABEL}' holds {written!r}, not true or false; {FIX}")
    answer = row.get(COMPLETION)
    last = answer if isinstance(answer, list) else [answer]
    first = last[0] if last else None
    if isinstance(first, dict) and standard_role(first) != "assistant":
        raise DataError(f"{origin}: {COMPLETION} must begin with the assistant's message; {FIX}")
    messages = conversation_of(row, COMPLETION, origin, column)
    prompt = len(messages) - len(last)
    before = [{**message, "train": False} for message in messages[:prompt]]
    return [*before, *messages[prompt:]], LABELS[label]


def _with_completion(row: dict[str, Any], column: str) -> dict[str, Any]:
    """``row`` with its label, and with the last message of a conversation as completion where it has none."""
    if TAG in row and LABEL not in row:
        row = {**row, LABEL: row[TAG]}
    name = first_there(row, (column, "messages", "conversations"))
    messages = None if name is None else row[name]
    if COMPLETION in row or not isinstance(messages, list) or len(messages) < 2:
        return row
    return {**row, str(name): messages[:-1], COMPLETION: messages[-1:]}


FIXES = {
    **dict.fromkeys(SIDES, "name the two answers 'chosen' and 'rejected'"),
    COMPLETION: "name the answer 'completion'",
    LABEL: "say by 'label' whether the answer is desirable",
}
"""Fix for a missing column."""


def _missing(column: str, row: dict[str, Any], origin: str) -> DataError:
    fix = FIXES[column]
    if column not in SIDES and all(side in row for side in SIDES):
        fix = "pairs are read by data=preferences_jsonl, for objective=dpo"
    elif column in SIDES and first_there(row, (LABEL, TAG)):
        fix = "labelled answers are read by data=unpaired_jsonl, for objective=kto"
    elif column in SIDES and (two := _two_answers(row)):
        fix = f"write the better of {two} as 'chosen', the other as 'rejected'"
    return DataError(f"{origin}: has no column '{column}'; columns: {', '.join(row) or 'none'}; {fix}")


def _two_answers(row: dict[str, Any]) -> str:
    """The two longest texts or lists whose columns differ by a last digit or letter only, or a list of answers."""
    stems = dict[str, list[str]]()
    for name, value in row.items():
        if isinstance(value, str | list) and name[-1:] in tuple("012abAB"):
            stems.setdefault(name[:-1], []).append(name)
    pairs = [names for names in stems.values() if len(names) == 2]
    if pairs:
        return " and ".join(max(pairs, key=lambda names: sum(len(str(row[name])) for name in names)))
    lists = (name for name in ("answers", "completions", "responses", "summaries") if isinstance(row.get(name), list))
    return next((f"two of {name}" for name in lists), "")


def unpaired_columns(column: str) -> list[str]:
    """Columns that become a conversation and its label."""
    return [*BESIDE, COMPLETION, LABEL, TAG, column, *PROMPTS, INPUT, CONTEXT, HISTORY]
