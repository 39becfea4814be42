"""What is trained under templates that models are published with. Oracle: the text around the answer, by its position.

TRL copies these templates; its package is downloaded, or the test is skipped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.errors import BadInputError
from tests.support.real_folders import need_chat_templates

SYSTEM, ASKED = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who are you?"}
ANSWER = "A friend indeed"
SAID = {"role": "assistant", "content": ANSWER}
SHAPES = {
    "usual": [ASKED, SAID],
    "system": [SYSTEM, ASKED, SAID],
    "two": [ASKED, SAID, ASKED, SAID],
    "first": [SAID],
    "first and another": [SAID, ASKED, SAID],
}
TOKEN = re.compile(r"<[^<>\s'\"{}]{2,40}>")
"""Special tokens as templates write them."""
LEAST = 20
"""Templates that have to be tried."""


def tried(file: Path) -> int:
    """Checks every shape that the template takes; returns their number."""
    source = file.read_text(encoding="utf-8")
    ends = sorted({"</s>", *TOKEN.findall(source)} - {"<think>", "</think>"})
    template, shapes, lead = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ends), 0, ""
    for name, messages in SHAPES.items():
        where = f"{file.name}, {name}"
        try:
            rendered = template.conversation(json.dumps({"messages": messages}), "x:1", "messages")
            prompt = template.prompt(messages[:-1]) if name == "usual" else ""
        except BadInputError:  # many refuse a system message, or an assistant who begins
            continue
        text, shapes = rendered.text, shapes + 1
        head = text[: text.index(ANSWER)]
        lead = head.removeprefix(prompt) if prompt and head.startswith(prompt) else lead
        places = [place.end() for place in re.finditer(ANSWER, text)]
        assert len(rendered.spans) == len(places) == sum(message is SAID for message in messages), where
        for (begin, end), place in zip(rendered.spans, places, strict=True):
            before, after = text[begin : place - len(ANSWER)], text[place:end]
            assert not re.sub(r"</?think>", "", before.removesuffix(lead)).strip(), where
            assert TOKEN.sub("", after) == "", f"{where}: {after!r} is trained after the answer"
    return shapes


def test_published_templates_train_the_answer_and_its_end_alone() -> None:
    files = sorted(need_chat_templates().glob("*.jinja"))
    own_marks = [file for file in files if re.search(r"\{%-?\s*generation\b", file.read_text(encoding="utf-8"))]
    shapes = [tried(file) for file in files if file not in own_marks]
    assert sum(number >= 2 for number in shapes) >= LEAST


@pytest.mark.parametrize("shape", ["usual", "first"])
def test_the_default_system_prompt_of_qwen_is_not_trained(shape: str) -> None:
    source = (need_chat_templates() / "qwen2_5.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, {"eos_token": "<|im_end|>"}, ["<|im_start|>", "<|im_end|>"])
    text, spans, *_ = template.conversation(json.dumps({"messages": SHAPES[shape]}), "x:1", "messages")
    assert "You are Qwen" in text and [text[begin:end] for begin, end in spans] == [f"{ANSWER}<|im_end|>"]
