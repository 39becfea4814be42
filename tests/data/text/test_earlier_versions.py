"""Conversations that earlier versions read otherwise: their cached tokens are not used, all others are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.cache import answer_once, digest_of, no_progress, read_manifest
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.text.conversations import joined_templates
from mgpu_pipe.data.text.earlier_versions import is_read_anew
from mgpu_pipe.data.text.file_source import contents_of
from mgpu_pipe.data.text.prepare_text import PreparedData
from tests.data.support import write_jsonl

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}",
)
REASONING = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
ALWAYS_ASKS = CHATML.partition("{% if")[0].replace("im_end", "endoftext") + "{{ '<|im_start|>assistant\n' }}"
USER, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Yes."}


def talk(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages or (USER, ANSWER)), **columns}


NEW: dict[str, tuple[dict[str, Any], str]] = {
    "messages in texts": ({"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])}, CHATML),
    "a system prompt": (talk(system_prompt="Be short."), CHATML),
    "functions": (talk(functions=[{"name": "f"}]), CHATML + "{{ tools }}"),
    "tools without their kind": (talk(tools='[{"name": "f"}]'), CHATML + "{{ tools }}"),
    "a function's answer": (
        {"conversations": [{"from": "function", "value": "a"}, {"from": "gpt", "value": "b"}]},
        CHATML,
    ),
    "another role": (talk({**USER, "role": "Human"}, ANSWER), CHATML),
    "tools of a template for tools": (
        talk(tools=[{"type": "function", "function": {"name": "f"}}]),
        joined_templates("{{ tools }}" + CHATML, CHATML),
    ),
    "another mark": (talk(USER, ANSWER, USER, {**ANSWER, "training": False}), CHATML),
    "a place of no picture": (talk({**USER, "content": "a <image> b"}, ANSWER), PARTS),
    "another field of reasoning": (talk(USER, {**ANSWER, "thinking": "why"}), REASONING),
    "a header after the last turn": (talk(), ALWAYS_ASKS),
}
OLD: dict[str, tuple[dict[str, Any], str]] = {
    "an observation": (
        {"conversations": [{"from": "observation", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": "[]"},
        CHATML,
    ),
    "whole tools": (talk(tools=[{"type": "function", "function": {"name": "f"}}]), CHATML),
    "tools of a template of its own branches": (
        talk(tools=[{"type": "function", "function": {"name": "f"}}]),
        "{% if tools %}{{ tools }}" + CHATML + "{% else %}" + CHATML + "{% endif %}",
    ),
    "plain": (talk(topic="a", system_prompt="", functions=[]), CHATML),
    "parts": (talk(), PARTS),
    "a system message": (talk({"role": "system", "content": "Be."}, USER, ANSWER, system_prompt="Be."), CHATML),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, CHATML),
    "known marks": (talk(USER, {**ANSWER, "train": False, "loss": False}, USER, {**ANSWER, "training": True}), CHATML),
    "a mark of a question": (talk({**USER, "loss": False}, ANSWER), CHATML),
    "a place that the template does not read": (talk({**USER, "content": "a <image> b"}, ANSWER), CHATML),
    "a place in an answer": (talk(USER, {**ANSWER, "content": "a <image> b"}), PARTS),
    "reasoning that nothing reads": (talk(USER, {**ANSWER, "thinking": "why"}), CHATML),
    "reasoning under its name": (talk(USER, {**ANSWER, "reasoning_content": "why"}), REASONING),
}
CALL = '{"name": "f", "arguments": {}}'
AGAIN: dict[str, dict[str, Any]] = {
    "a system prompt next to a System message": talk({"role": "System", "content": "Be."}, USER, ANSWER, system="Be."),
    "the same in a text": {
        "messages": json.dumps([{"role": "System", "content": "Be."}, USER, ANSWER]),
        "system": "Be.",
    },
    "an Observation": {"conversations": [{"from": "Observation", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "a Function_Call": {"conversations": [{"from": "Function_Call", "value": CALL}, {"from": "gpt", "value": "b"}]},
    "a Tool_Call": talk({"role": "Tool_Call", "content": CALL}, ANSWER),
}
"""Rows of roles that the version before read otherwise too."""


@pytest.mark.parametrize("name", [*NEW, *OLD, *AGAIN])
def test_only_conversations_that_are_read_otherwise_get_another_identity(tmp_path: Path, name: str) -> None:
    row, template = {**NEW, **OLD}.get(name) or (AGAIN[name], CHATML)
    (tmp_path / "template.jinja").write_text(template)
    file, cache = write_jsonl(tmp_path / "chats.jsonl", [talk(), row]), tmp_path / "cache"
    words = (f"data.paths=[{file}]", f"data.cache_dir={cache}", f"data.chat_template={tmp_path / 'template.jinja'}")
    chosen = ("data=chat_jsonl", "model=llama_tiny", "model.config.vocab_size=300", "data.tokenize_workers=1")
    contents = contents_of([file], {}, fingerprints([file], cache, no_progress))
    answer_once(cache, ["files", "chat_jsonl", "messages", contents], lambda: False)  # by an earlier version
    prepared = prepare(compose([*chosen, *words, "data.validation_fraction=0", "data.seq_len=64"])[0])
    assert isinstance(prepared, PreparedData)
    names = []
    for mark in ([], ["anew"]):
        source = digest_of("files", "chat_jsonl", "messages", contents, *mark)
        known = read_manifest(prepared.folder) or {}
        before = {"source": source, "tokenizer": known["tokenizer"], "format": 1, "conversations": 2}
        names.append(digest_of(before))
    assert (prepared.folder.name == names[0]) == (name in OLD)
    assert prepared.folder.name != names[1] or name in NEW
    assert prepared.folder.name == names[1] or name != "another role"


def test_prompts_of_answers_that_lie_elsewhere_now_are_read_anew() -> None:
    sides: dict[str, Any] = {"chosen": "Yes.", "rejected": "No."}
    assert is_read_anew({**talk(), **sides, "prompt": "What?"}, "messages", "preferences")
    assert not is_read_anew({**talk(USER), **sides, "prompt": "What?"}, "messages", "preferences")
    whole = {name: [USER, {**ANSWER, "content": text}] for name, text in sides.items()}
    assert not is_read_anew({**talk(), **whole, "prompt": "What?"}, "messages", "preferences")
    written = {name: json.dumps([{**ANSWER, "content": text}]) for name, text in sides.items()}
    assert is_read_anew({**written, "prompt": "What?"}, "messages", "preferences")
    assert is_read_anew({**sides, "prompt": "\n\nHuman: What?\n\nAssistant:"}, "messages", "preferences")
    assert is_read_anew({"instruction": "a", "output": "b", "context": "c"}, "messages", "chat")
    for text in (json.dumps([ANSWER]), str([ANSWER])):
        assert is_read_anew({"prompt": text, "completion": text}, "messages", "chat")


def test_a_cache_that_cannot_be_written_still_answers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("no folder")  # as unwritable as a read-only disk, also for root
    assert answer_once(tmp_path, "rows", lambda: True) and not answer_once(tmp_path, "rows", lambda: False)
