"""Conversations: which characters and tokens the assistant said, for templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer

from mgpu_pipe.data.chat import ChatTemplate, _common_prefix
from mgpu_pipe.data.dataset import PackedDataset
from mgpu_pipe.data.prepare import prepare
from mgpu_pipe.data.token_store import TokenStore
from mgpu_pipe.data.window import IGNORE_INDEX
from mgpu_pipe.errors import ConfigError, DataError
from tests.data.support import CHATML, config, sentences, write_jsonl

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Hi. Who?"},
    {"role": "assistant", "content": "Me: <Hi.> \u00e9\U0001f600"},
]
# Strips contents and ends turns by a plain newline.
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}" \
        "{% if add_generation_prompt %}assistant: {% endif %}"
# Drops the reasoning of all answers but the last one, and adds an empty one to that, as Qwen3's template does.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content }}"
    "</think>\n\n{% endif %}{{ answer }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{%- for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}#"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
REFUSES_SYSTEM_ALONE = (
    "{% if messages[0].role == 'system' and messages | length < 2 %}{{ raise_exception('user first') }}{% endif %}"
    + CHATML
)


def _said(source: str, talk: list[dict[str, str]], **options: object) -> list[str]:
    template = ChatTemplate(source, {"eos_token": "</s>"}, ("<|im_end|>",))
    text, spans = template.conversation(json.dumps({"messages": talk, **options}), "f:1", "messages")
    assert text == template.render(talk)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, ["Hi.<|im_end|>\n", TALK[4]["content"] + "<|im_end|>\n"]),
        (REFUSES_SYSTEM_ALONE, ["Hi.<|im_end|>\n", TALK[4]["content"] + "<|im_end|>\n"]),
        (PLAIN, ["Hi.\n", TALK[4]["content"] + "\n"]),
        (REASONING, ["Hi.<|im_end|>", "<think>\n</think>\n\n" + TALK[4]["content"] + "<|im_end|>\n"]),
    ],
)
def test_the_spans_are_what_the_template_adds_for_the_assistant(source: str, expected: list[str]) -> None:
    assert _said(source, TALK) == expected


def test_contents_that_the_template_trims_or_cuts_are_found() -> None:
    talk = [TALK[1], {"role": "assistant", "content": " <think>\nwhy\n</think>\n\nBecause. "}, TALK[3], TALK[4]]
    assert _said(REASONING, talk)[0] == "Because. <|im_end|>"
    assert _said(PLAIN, [TALK[1], {"role": "assistant", "content": "  x "}]) == ["x\n"]


def test_a_template_may_mark_what_is_generated_itself() -> None:
    template = ChatTemplate(GENERATION)
    text, spans = template.conversation(json.dumps({"messages": TALK}), "f:1", "messages")
    assert text == "[system]Be brief.[user]Hello?[assistant]Hi.#[user]Hi. Who?[assistant]" + TALK[4]["content"] + "#"
    assert [text[start:end] for start, end in spans] == ["Hi.#", TALK[4]["content"] + "#"]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": []}, "must be a list of messages"),
        ({"messages": "hello"}, "must be a list of messages"),
        ({"messages": [{"content": "x"}]}, "message 1 is not an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of message 1 must be a string"),
        ({"messages": TALK[:2]}, r"no message has the role assistant \(roles: system, user\)"),
        ({"chat": TALK, "id": 2}, "no column 'messages'; set data.messages_column to one that is there: chat, id"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "half of a surrogate pair"),
    ],
)
def test_wrong_conversations_are_named_by_file_and_line(row: dict[str, object], match: str) -> None:
    with pytest.raises(DataError, match=r"^f:7: .*" + match):
        ChatTemplate(CHATML).conversation(json.dumps(row), "f:7", "messages")


def test_a_template_that_refuses_or_breaks_out_is_stopped() -> None:
    talk = json.dumps({"messages": TALK})
    with pytest.raises(DataError, match="f:1: the chat template refuses these messages: no system"):
        ChatTemplate("{{ raise_exception('no system') }}").conversation(talk, "f:1", "messages")
    for escape in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(SecurityError):
            ChatTemplate(escape).render(TALK)
        with pytest.raises(DataError, match="f:1: the chat template refuses"):
            ChatTemplate(escape).conversation(talk, "f:1", "messages")


def test_the_loss_counts_the_assistants_tokens_only(tmp_path: Path) -> None:
    talks = [
        [{"role": "user", "content": sentences(n, 5)}, {"role": "assistant", "content": f"{n} " + sentences(-n, 4)}]
        for n in range(1, 11)
    ]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": talk} for talk in talks])
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template=str(tmp_path / "chat.jinja"),
                 seq_len=512, packing="none")
    prepared = prepare(run)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    store = TokenStore.open(prepared.folder)
    assert store.loss_mask is not None
    seen = []
    for split in ("train", "validation"):
        dataset = PackedDataset.open(prepared, split)
        batch = dataset.batch(np.arange(len(dataset)))
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            said = tokenizer.decode([label for label in labels if label != IGNORE_INDEX], skip_special_tokens=False)
            seen.append((text, said))
    expected = [
        (ChatTemplate(CHATML).render(talk), talk[1]["content"] + "<|im_end|>\n<|endoftext|>") for talk in talks
    ]
    assert sorted(seen) == sorted(expected)
    assert prepared.train_tokens < prepared.num_tokens / 2


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": TALK}])
    run = config(tmp_path, source="chat_jsonl", paths=[str(path)])
    with pytest.raises(ConfigError, match=r"data\.chat_template=null: data\.source=chat_jsonl needs a chat template"):
        prepare(run)
    (tmp_path / "bad.jinja").write_text("{% for %}", encoding="utf-8")
    run.data.chat_template = str(tmp_path / "bad.jinja")
    with pytest.raises(ConfigError, match=r"data\.chat_template=.*bad\.jinja: line 1: "):
        prepare(run)
    run.data.chat_template = str(tmp_path / "absent.jinja")
    with pytest.raises(ConfigError, match=r"data\.chat_template=.*absent\.jinja: cannot be read"):
        prepare(run)


def test_the_common_beginning_of_long_texts_is_found_by_halving() -> None:
    for length in (0, 1, 2, 3, 1000):
        for same in (0, 1, length // 2, length):
            one, other = "a" * length, "a" * same + "b" * (length - same)
            assert _common_prefix(one, other) == _common_prefix(other, one) == min(same, length)
    assert _common_prefix("ab", "abc") == 2
