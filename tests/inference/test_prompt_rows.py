"""Rows of training data that are asked as they are: the model reads what training reads before the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.inference.batch.prompts import PromptRow, prompt_of, read_prompts, visual_prompt_of
from tests.inference.test_answer_files import write_rows

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "secret"}
CALL = '{"name": "secret", "arguments": {}}'
NAMES = ("assistant", "Assistant", "model", "bot", "chatgpt", "gpt", "AI", " assistant ")


def read_prompt(folder: Path, row: dict[str, Any], sees: bool = False) -> Any:
    """The prompt of a row of a file; with ``sees`` of a model of pictures."""
    prompts: list[Any] = []

    def encode(line: int, request: dict[str, Any], origin: str) -> PromptRow:
        if sees:
            prompt, chat_row = visual_prompt_of(request, origin, PictureChatConfig(), folder, ("<image>",))
            assert [file.name for file in chat_row.pictures] == ["a.png"]
            prompts.append(prompt)
        else:
            prompts.append(prompt_of(request, origin))
        return PromptRow(line)

    [read] = read_prompts(write_rows(folder / "rows.jsonl", [row]), encode)
    assert not read.error, read.error
    return prompts[0]


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        *({"messages": [USER, {**ANSWER, "role": name}]} for name in NAMES),
        *({"conversations": [{"from": "human", "value": "q"}, {"from": name, "value": "secret"}]} for name in NAMES),
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": CALL}]},
        {"messages": [USER, {"role": "tool_call", "content": CALL}]},
        {"messages": [USER, {**ANSWER, "content": "r"}, USER, {**ANSWER, "role": "model"}]},
        {"messages": json.dumps([USER, ANSWER])},
        {"conversations": json.dumps([USER, ANSWER])},
        {"messages": ["q", "secret"]},
        {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
        {"system": "s", "prompt": "q", "completion": "secret"},
        {"system_prompt": "s", "prompt": "q", "completion": "secret"},
        {"history": [["a", "b"]], "prompt": "q", "completion": "secret"},
        {"system": "s", "history": [USER, ANSWER], "prompt": "q", "completion": "secret"},
    ],
)
def test_a_row_of_training_data_is_asked_without_its_answer(tmp_path: Path, row: dict[str, Any], sees: bool) -> None:
    conversation = messages_of(row, "row", "messages")
    assert conversation[-1]["role"] == "assistant" and "secret" in str(conversation[-1])
    if sees:
        (tmp_path / "a.png").write_bytes(b"a picture")
        conversation[-2]["content"] = "<image>q"
        text = json.dumps(row)
        at = text.rindex('q"') if '\\"q' not in text else text.rindex("q\\")
        row = {**json.loads(f"{text[:at]}<image>{text[at:]}"), "images": ["a.png"]}
    assert read_prompt(tmp_path, row, sees) == conversation[:-1]


def test_a_prompt_alone_stays_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a picture")
    for row in ({}, {"system": "", "history": []}, {"completion": "secret"}):
        assert read_prompt(tmp_path, {"prompt": '[{"role": "q', **row}) == '[{"role": "q'
        assert read_prompt(tmp_path, {"prompt": "q", "images": ["a.png"], **row}, sees=True) == "<image>q"
    before = [["<image> a", "b"]]
    seen = read_prompt(tmp_path, {"prompt": "q", "history": before, "images": ["a.png"]}, sees=True)
    assert [message["content"] for message in seen] == ["<image> a", "b", "q"]
