"""The shipped chat templates, the tokens that they need, and the forms of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.text import chat_templates
from mgpu_pipe.data.text.chat_templates import SPECIAL
from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigError, DataError
from tests.data.support import config, sentences, write_jsonl
from tests.inference.support import write_tokenizer

CHATML = (Path(chat_templates.__file__).parent / "templates" / "chatml.jinja").read_text(encoding="utf-8")
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
TALK = [*ASKED, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Who?"}]
TALK = [*TALK, {"role": "assistant", "content": "Me."}]
# What the makers' models are trained on, written down from their model cards: text, what is said, end of a turn.
WRITTEN = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nMe.<|im_end|>\n",
        ["Hi.<|im_end|>", "Me.<|im_end|>"],
        "<|im_end|>",
    ),
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nMe.<|im_end|>\n",
        ["Hi.<|im_end|>", "<think>\n\n</think>\n\nMe.<|im_end|>"],
        "<|im_end|>",
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nWho?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nMe.<|eot_id|>",
        ["Hi.<|eot_id|>", "Me.<|eot_id|>"],
        "<|eot_id|>",
    ),
    "gemma3": (
        "<s><start_of_turn>user\nBe brief.\n\nHello?<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
        "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\nMe.<end_of_turn>\n",
        ["Hi.<end_of_turn>", "Me.<end_of_turn>"],
        "<end_of_turn>",
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hello?<|im_end|><|im_start|>assistant"
        "<|im_sep|>Hi.<|im_end|><|im_start|>user<|im_sep|>Who?<|im_end|><|im_start|>assistant<|im_sep|>Me.<|im_end|>",
        ["Hi.<|im_end|>", "Me.<|im_end|>"],
        "<|im_end|>",
    ),
    "mistral": (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hello?[/INST]Hi.</s>[INST]Who?[/INST]Me.</s>",
        ["Hi.</s>", "Me.</s>"],
        "</s>",
    ),
    "deepseek": (
        "<s>Be brief.<\uff5cUser\uff5c>Hello?<\uff5cAssistant\uff5c>Hi.</s>"
        "<\uff5cUser\uff5c>Who?<\uff5cAssistant\uff5c>Me.</s>",
        ["Hi.</s>", "Me.</s>"],
        "</s>",
    ),
    "paligemma": ("<s>Be brief.\n<s>Hello?\nHi.</s><s>Who?\nMe.</s>", ["Hi.</s>", "Me.</s>"], "</s>"),
    "plain": (
        "System: Be brief.\nUser: Hello?\nAssistant: Hi.</s>\nUser: Who?\nAssistant: Me.</s>\n",
        [" Hi.</s>", " Me.</s>"],
        "</s>",
    ),
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"function": {"name": "add", "arguments": {"x": 1, "y": 2}}}
CALLED: list[dict[str, Any]] = [
    ASKED[1],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def source_of(name: str) -> str:
    return Path(chat_templates.__file__).with_name("templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8")


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(source_of(name), {"bos_token": "<s>", "eos_token": "</s>"}, (*SPECIAL[name], "</s>"))


@pytest.mark.parametrize("name", SPECIAL)
def test_a_named_template_writes_what_its_models_read(name: str, tmp_path: Path) -> None:
    text, said, end = WRITTEN[name]
    template = template_of(name)
    rendered, spans, *_ = template.conversation(json.dumps({"messages": TALK}), "f:1", "messages")
    assert rendered == text and [text[a:b] for a, b in spans] == said and template.turn_end() == end
    assert all(token in source_of(name) for token in SPECIAL[name])
    prompt = template.prompt(ASKED)
    assert text.startswith(prompt) and text[len(prompt) :].startswith(said[0])
    theirs = PreTrainedTokenizerFast.from_pretrained(str(write_tokenizer(tmp_path)))
    theirs.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    for messages, asks in ((TALK, False), (ASKED, True)):
        mine = template.render(messages, prompt=asks)
        assert mine == theirs.apply_chat_template(
            messages, chat_template=source_of(name), tokenize=False, add_generation_prompt=asks
        )


@pytest.mark.parametrize("name", SPECIAL)
def test_calls_of_tools_are_what_is_said_or_refused(name: str) -> None:
    row = json.dumps({"messages": CALLED, "tools": TOOLS})
    calls = {
        "qwen3": '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call><|im_end|>',
        "llama3": '{"name": "add", "parameters": {"x": 1, "y": 2}}<|eot_id|>',
    }
    if name not in calls:
        with pytest.raises(DataError, match=f"f:1: .*{name} writes no tools; use qwen3 or llama3"):
            template_of(name).conversation(row, "f:1", "messages")
        return
    text, spans, *_ = template_of(name).conversation(row, "f:1", "messages")
    said = [text[a:b] for a, b in spans]
    assert said[0] == calls[name] and "It is 3." in said[1] and json.dumps(TOOLS[0]["type"]) in text


@pytest.mark.parametrize("own", [False, True], ids=["a tokenizer that is trained", "a tokenizer that is there"])
def test_the_tokens_of_a_named_template_are_single(own: bool, tmp_path: Path) -> None:
    talks = [
        [{"role": "user", "content": sentences(n, 5)}, {"role": "assistant", "content": f"{n}"}] for n in range(20)
    ]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": talk} for talk in talks])
    run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template="llama3", seq_len=128)
    if own:
        run.data.tokenizer, run.model.config = str(write_tokenizer(tmp_path / "tokenizer")), {"vocab_size": 310}
    prepared = prepare(run)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in SPECIAL["llama3"]]
    assert None not in ids
    stored = TokenStore.open(prepared.folder).tokens.tolist()
    assert [stored.count(one) for one in ids] == [40, 40, 40]
    assert not any("header" in token for token in tokenizer.get_vocab(with_added_tokens=False) if token[:2] != "<|")


def test_a_model_without_rows_for_the_tokens_is_refused_with_the_size(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": TALK}])
    folder = write_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}', encoding="utf-8")
    run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template="llama3", validation_fraction=0.0)
    run.data.seq_len = 128
    run.model.path, run.model.type, run.model.config = str(folder), None, {}
    with pytest.raises(ConfigError, match=r"llama3: .*300 rows.*; add model\.config\.vocab_size=(\d+)") as told:
        prepare(run)
    run.model.config = {"vocab_size": int(str(told.value).split("vocab_size=")[1].split(",")[0])}
    assert prepare(run).num_tokens > 0


@pytest.mark.parametrize(
    ("row", "form", "expected"),
    [
        ({"messages": TALK}, "messages", TALK),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "sharegpt",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            {"instruction": "a", "input": "c", "output": "b", "system": "s"},
            "alpaca",
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a\n\nc"},
                {"role": "assistant", "content": "b"},
            ],
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "alpaca",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            {"prompt": "a", "completion": "b"},
            "prompt_completion",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        ({"prompt": TALK[:2], "completion": TALK[2:3]}, "prompt_completion", TALK[:3]),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
                ]
            },
            "messages",
            [{"role": "assistant", "content": "ab"}],
        ),
    ],
)
def test_every_form_gives_messages(row: dict[str, Any], form: str, expected: list[dict[str, str]]) -> None:
    assert messages_of(row, "f:1", "messages", form) == messages_of(row, "f:1", "messages") == expected


def test_a_message_may_be_left_out_of_the_loss() -> None:
    """Programs that give every message the same fields write null for those that it has not."""
    for word in ({"train": False, "weight": None}, {"weight": 0, "train": None}):
        null = dict.fromkeys(word)
        talk = [*TALK[:2], {**TALK[2], **word}, *({**message, **null} for message in TALK[3:])]
        text, spans, *_ = template_of("chatml").conversation(json.dumps({"messages": talk}), "f:1", "messages")
        assert text == WRITTEN["chatml"][0] and [text[a:b] for a, b in spans] == WRITTEN["chatml"][1][1:]


def test_null_fields_of_messages_are_left_out_as_parquet_leaves_them_out() -> None:
    """Nulls in the arguments of a call are values."""
    call = {"type": "function", "id": None, "function": {"name": "f", "arguments": {"x": None}, "strict": None}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    row = {"messages": [{"role": "user", "content": "a", "name": None, "tool_calls": None}, said]}
    user, answer = messages_of(row, "f:1", "messages")
    assert user == {"role": "user", "content": "a"}
    assert answer["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]


@pytest.mark.parametrize(
    ("row", "form", "match"),
    [
        ({"instruction": "a"}, "alpaca", "no column 'output', which data.format needs; columns: instruction"),
        ({"prompt": 3, "completion": "b"}, "prompt_completion", "column 'prompt' holds int, not a string"),
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            "auto",
            r"no message has the role assistant \(roles: user\)",
        ),
        ({"conversations": "x"}, "auto", "must be a list of messages"),
        ({"text": "x"}, "auto", "no column 'messages'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "auto",
            "message 1 has a part that is no text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "auto",
            "weight of message 1 is 0.5; use 0 or 1",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "train": "no"}]},
            "auto",
            "train of message 1 is 'no'; use true",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "train": False}]},
            "auto",
            "leaves all the assistant's messages out",
        ),
    ],
)
def test_a_wrong_row_is_named(row: dict[str, Any], form: str, match: str) -> None:
    with pytest.raises(DataError, match="^f:7: .*" + match):
        messages_of(row, "f:7", "messages", form)


def test_a_name_that_is_nearly_right_is_suggested(tmp_path: Path) -> None:
    run = config(tmp_path, source="chat_jsonl", paths=["none"], chat_template="lama3")
    with pytest.raises(ConfigError, match=r"data\.chat_template=lama3: .*did you mean llama3\?"):
        chat_templates.check_chat(run.model, run.data)


def test_what_is_left_out_and_odd_turns_are_told_once_with_the_line(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
    rows = {
        "reasoning_content of message 2": [asked, {**said, "reasoning_content": "Because."}],
        "messages 1 and 2 are both the user's": [asked, asked, said],
        "the last message is the user's: no answer follows": [asked, said, asked],
        "name of message 1": [{**asked, "name": "Ann"}, said],
        "nothing reads the field 'learn' of message 2; train=false leaves": [asked, {**said, "learn": False}],
        "message 2 is an answer without content: its end alone": [asked, {**said, "content": ""}],
    }
    for why, messages in rows.items():
        template = ChatTemplate(CHATML)
        template.conversation(json.dumps({"messages": messages}), "x.jsonl:7", "messages")
        template.conversation(json.dumps({"messages": messages}), "x.jsonl:8", "messages")
        assert template.odd == 2 and template.first_odd.startswith("x.jsonl:7: ") and why in template.first_odd
    file = tmp_path / "talk.jsonl"
    talks = [[asked, said], *rows.values()]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    words = ["data=chat_jsonl", f"data.paths=[{file}]", "data.chat_template=chatml", "model.config.vocab_size=300"]
    prepared = prepare(compose([*words, f"data.cache_dir={tmp_path}/cache", "data.validation_fraction=0"])[0])
    first = "talk.jsonl:2: the chat template leaves out (a part of) reasoning_content of message 2"
    assert prepared.told.endswith(f"{first}; 5 more conversations are odd")
    plain = ChatTemplate(CHATML)
    plain.conversation(json.dumps({"messages": [asked, {**said, "content": " b "}]}), "x", "messages")
    unused = [{**said, "content": "", "train": False}, {**said, "role": "user", "loss": None}]
    plain.conversation(json.dumps({"messages": [asked, *unused[:1], asked, said, *unused[1:], said]}), "x", "messages")
    assert not plain.odd


def test_a_template_that_hides_the_answer_is_refused() -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]})
    for hidden in ("", "{% generation %}x{% endgeneration %}"):
        shown = "{% if m.role == 'user' %}{{ m.content }}{% else %}" + hidden + "{% endif %}"
        template = ChatTemplate("{% for m in messages %}" + shown + "<end>{% endfor %}", stop_tokens=("<end>",))
        with pytest.raises(DataError, match="x:1: the chat template hides what the assistant says in message 2"):
            template.conversation(row, "x:1", "messages")
