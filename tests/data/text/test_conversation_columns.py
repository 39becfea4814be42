"""Columns next to messages: read, named once, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.data.data_source import check_sources
from mgpu_pipe.data.text.conversations import calls_of, columns_read, messages_of, tools_of, unused_columns
from mgpu_pipe.data.text.preference_rows import preference_of
from mgpu_pipe.data.text.preferences import prepare_preferences, summarize_margins
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.errors import BadInputError, DataError
from tests.data.support import config, write_jsonl
from tests.data.text.test_chat_templates import TOOLS, template_of

ASKED, SAID = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "Be brief."}
ADD = {"name": "add", "arguments": "{}"}
SHAREGPT = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": SHAREGPT, "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
        ({"messages": [ASKED, SAID], "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
        ({"messages": [SYSTEM, ASKED, SAID], "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
        ({"messages": [ASKED, SAID], "system": None}, [ASKED, SAID]),
        ({"conversations": SHAREGPT, "system": ""}, [ASKED, SAID]),
        ({"prompt": "a?", "completion": "b", "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
        ({"instruction": "a?", "output": "b", "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
        (
            {"instruction": "a?", "output": "b", "history": [["c?", "d"], ["e?", "f"]]},
            [
                {"role": "user", "content": "c?"},
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": "e?"},
                {"role": "assistant", "content": "f"},
                ASKED,
                SAID,
            ],
        ),
        ({"instruction": "a?", "output": "b", "history": [], "input": None}, [ASKED, SAID]),
        ({"instruction": "a?", "output": "b", "history": [ASKED, SAID]}, [ASKED, SAID, ASKED, SAID]),
        (
            {"conversations": [SHAREGPT[0], {"from": "function_call", "value": '{"name": "add", "arguments": {}}'}]},
            [ASKED, {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {}}]}],
        ),
        (
            {"messages": [ASKED, {**SAID, "tool_calls": '[{"name": "add", "arguments": {}}]'}]},
            [ASKED, {**SAID, "tool_calls": [{"name": "add", "arguments": {}}]}],
        ),
        ({"messages": [ASKED, {**SAID, "tool_calls": ""}]}, [ASKED, SAID]),
        (
            {"messages": [ASKED, {**SAID, "function_call": ADD}, {"role": "function", "name": "add", "content": "2"}]},
            [
                ASKED,
                {**SAID, "tool_calls": [{"type": "function", "function": ADD}]},
                {"role": "tool", "name": "add", "content": "2"},
            ],
        ),
        ({"messages": [{"role": "function", "content": "2"}, SAID]}, [{"role": "function", "content": "2"}, SAID]),
        ({"messages": json.dumps([ASKED, SAID])}, [ASKED, SAID]),
        ({"messages": ["a?", "b", "a?", "b"], "system": "Be brief."}, [SYSTEM, ASKED, SAID, ASKED, SAID]),
        ({"messages": [{"role": "Human", "content": ["a", "?"]}, {**SAID, "role": "model"}]}, [ASKED, SAID]),
        ({"conversations": [{"from": "prompter", "value": "a?"}, {"from": "bot", "value": "b"}]}, [ASKED, SAID]),
        (
            {
                "messages": [
                    ASKED,
                    {"role": "Assistant", "content": [{"type": "output_text", "text": "b", "loss": None}]},
                ]
            },
            [ASKED, SAID],
        ),
        (
            {"instruction": "a", "context": "?", "response": "b", "category": "c"},
            [{**ASKED, "content": "a\n\n?"}, SAID],
        ),
        ({"instruction": "", "input": "a?", "output": "b"}, [ASKED, SAID]),
        ({"system_prompt": "Be brief.", "question": "a?", "response": "b"}, [SYSTEM, ASKED, SAID]),
        ({"query": "a?", "response": "b", "history": [["a?", "b"]]}, [ASKED, SAID, ASKED, SAID]),
        ({"input": "a?", "output": "b"}, [ASKED, SAID]),
        ({"prompt": "a?", "response": "b", "context": "unread"}, [ASKED, SAID]),
        (
            {"system": [{"text": "Be brief."}], "messages": [ASKED, {**SAID, "content": [{"text": "b"}]}]},
            [SYSTEM, ASKED, SAID],
        ),
        (
            {
                "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
                "contents": [{"role": "user", "parts": [{"text": "a?"}]}, {"role": "model", "parts": [{"text": "b"}]}],
            },
            [SYSTEM, ASKED, SAID],
        ),
        (
            {"conversations": [*SHAREGPT, {"from": "function", "value": "2"}]},
            [ASKED, SAID, {"role": "tool", "content": "2"}],
        ),
        (
            {
                "messages": [
                    ASKED,
                    *({"role": "tool_call", "content": json.dumps({"name": name, "arguments": {}})} for name in "fg"),
                    *({"role": "tool_response", "content": text} for text in "12"),
                    SAID,
                    {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
                ]
            },
            [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"name": name, "arguments": {}} for name in "fg"],
                },
                *({"role": "tool", "content": text} for text in "12"),
                {**SAID, "tool_calls": [{"name": "f", "arguments": {}}]},
            ],
        ),
        *(
            (
                {"messages": [ASKED, {**SAID, "tool_calls": calls}, {"role": "tool_call", "content": '{"name": "f"}'}]},
                [ASKED, {**SAID, "tool_calls": [{"name": name} for name in names]}],
            )
            for calls, names in ((None, "f"), ('[{"name": "g"}]', "gf"), ({"name": "g"}, "gf"))
        ),
    ],
)
def test_known_columns_become_messages(row: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert messages_of(row, "x.jsonl:1", "messages") == expected


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [ASKED, SAID], "system": 3}, "column 'system' holds int, not a string"),
        ({"messages": [ASKED, SAID], "system": ["a"]}, "column 'system' holds list, not a string"),
        ({"messages": [SYSTEM, ASKED, SAID], "system": "Be long."}, "are different system messages"),
        ({"instruction": "a", "output": "b", "history": "c"}, "column 'history' must be a list of pairs"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "column 'history' must be a list of pairs"),
        ({"instruction": "a", "output": "b", "input": 3}, "column 'input' holds int, not a string"),
        ({"messages": [ASKED, {**SAID, "tool_calls": "add"}]}, "tool_calls of message 2 must be a list of objects"),
        (
            {"messages": [ASKED, {**SAID, "tool_calls": [{"x": 1}]}]},
            "tool_calls of message 2 must be a list of objects",
        ),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "tool_calls of message 1 must be a list"),
        (
            {"messages": [ASKED, {**SAID, "content": "", "function_call": {"arguments": "{}"}}]},
            "tool_calls of message 2 must be a list of objects with a name",
        ),
        ({"messages": [ASKED, SAID], "tools": 3}, "column 'tools' must be a list of objects"),
        ({"messages": [ASKED, SAID], "tools": "add"}, "column 'tools' must be a list of objects"),
        ({"messages": [ASKED, SAID], "tools": ["add"]}, "column 'tools' must be a list of objects"),
        (
            {"messages": [ASKED, {**SAID, "content": [{"type": "text", "text": "b", "train": False}]}]},
            "a part of message 2 has a mark of its own; mark whole messages",
        ),
        (
            {"messages": [ASKED, {**SAID, "train_detail": [{"begin_offset": 0, "end_offset": 0, "train": False}]}]},
            "train_detail of message 2 marks parts of it; mark whole messages",
        ),
        ({"segments": [{"label": True, "text": "a"}]}, "but segments; rename its columns"),
    ],
)
def test_wrong_kinds_are_refused_in_one_line(row: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInputError) as refused:
        template_of("qwen3").conversation(json.dumps(row), "x.jsonl:1", "messages")
    assert told in str(refused.value) and str(refused.value).startswith("x.jsonl:1: ")


@pytest.mark.parametrize("mark", ["train", "training", "train_on_turn", "loss"])
def test_each_mark_leaves_an_answer_out_of_the_loss(mark: str) -> None:
    row = {"messages": [ASKED, {**SAID, mark: False}, ASKED, {**SAID, mark: 1}]}
    template = template_of("chatml")
    text, spans, *_ = template.conversation(json.dumps(row), "x:1", "messages")
    assert [text[begin:end] for begin, end in spans] == ["b<|im_end|>"] and spans[0][0] > text.index("b<|im_end|>")
    assert not template.odd


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        ("", "prefix of messages, tools, train_on_eot of messages"),
        ("{{ m.prefix }}", "tools, train_on_eot of messages"),
        ("{{ tools }}", "prefix of messages, train_on_eot of messages"),
    ],
)
def test_fields_of_messages_that_nothing_reads_are_named_once(read: str, unread: str) -> None:
    template = ChatTemplate(f"{{% for m in messages %}}{{{{ m.role + m.content }}}}{read}{{% endfor %}}")
    said = {**SAID, "train_on_eot": True, "prefix": "", "weight": 1, "loss": True}
    for number in (1, 2):
        row = {"messages": [ASKED, said], "tools": TOOLS}
        template.conversation(json.dumps(row), f"x:{number}", "messages")
    assert template.notes.summary().startswith(f"columns that are not used: {unread} (first: ")
    assert set(template.notes.unused.values()) == {"x:1"}


def test_functions_are_tools() -> None:
    rows = [
        *({"messages": [ASKED, SAID], name: [TOOLS[0]["function"]]} for name in ("functions", "tools")),
        {"messages": [ASKED, SAID], "tools": TOOLS[:1]},
    ]
    assert tools_of(rows[0], "x:1") == tools_of(rows[1], "x:1") == tools_of(rows[2], "x:1")
    assert not unused_columns(rows[0], columns_read(rows[0], "messages"))


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])], json.dumps(TOOLS[0])])
def test_tools_that_are_written_as_json_are_read(tools: object) -> None:
    rows = [json.dumps({"messages": [ASKED, SAID], "tools": value}) for value in (TOOLS, tools)]
    texts = [template_of("qwen3").conversation(row, "x:1", "messages")[0] for row in rows]
    assert texts[0] == texts[1] and json.dumps(TOOLS[0]) in texts[0]
    assert [tools_of({"tools": none}, "x:1") for none in (None, "", [], "[]", "null", {})] == [None] * 6


def test_unused_columns_are_named_once(tmp_path: Path) -> None:
    rows = [{"messages": [ASKED, SAID], "id": number, "system": "", "tools": None} for number in range(3)]
    rows.append({"instruction": "a?", "output": "b", "text": "whole", "history": None})
    path = str(write_jsonl(tmp_path / "chat.jsonl", rows))
    run = config(tmp_path, source="chat_jsonl", paths=[path], chat_template="chatml", validation_fraction=0.0)
    run.model.config = {"vocab_size": 400}
    assert prepare(run).told == f"columns that are not used: id, text (first: id at {path}:1)"
    nested = [{"log": {"chat": [ASKED, SAID]}}]
    run.data.paths, run.data.messages_column = [str(write_jsonl(tmp_path / "nested.jsonl", nested))], "log.chat"
    assert prepare(run).told == ""


def test_unused_columns_of_preferences_are_named_once() -> None:
    template = template_of("qwen3")
    row = {"system": "", "prompt": "a?", "history": None, "chosen": "b", "rejected": "c", "score_chosen": 1.0}
    for at in range(3):
        template.preference(json.dumps({**row, "tools": None}), f"x:{at}", "messages")
    assert template.notes.summary() == "columns that are not used: score_chosen (first: score_chosen at x:0)"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"system": "Be brief.", "question": "a?"}, [SYSTEM, ASKED]),
        ({"system": "Be brief.", "prompt": "a?"}, [SYSTEM, ASKED]),
        ({"system": None, "prompt": [SYSTEM, ASKED]}, [SYSTEM, ASKED]),
        ({"instruction": "a?", "input": ""}, [ASKED]),
        ({"instruction": "a?", "history": [["c?", "d"]]}, [*messages_of({"messages": [ASKED, SAID]}, "", "messages")]),
        ({"conversations": SHAREGPT[:1]}, [ASKED]),
    ],
)
def test_published_preferences_keep_their_columns(row: dict[str, Any], prompt: list[dict[str, Any]]) -> None:
    if "history" in row:
        prompt = [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}, ASKED]
    for chosen, rejected in (("b", "c"), ([SAID], [{**SAID, "content": "c"}]), ({"from": "gpt", "value": "b"}, "c")):
        both = preference_of({**row, "chosen": chosen, "rejected": rejected}, "x:1", "messages")
        for messages, text in zip(both, "bc", strict=True):
            shown = [{name: message[name] for name in ("role", "content")} for message in messages]
            assert shown == [*prompt, {"role": "assistant", "content": text}]
            assert [message.get("train", True) for message in messages] == [*[False] * len(prompt), True]


def test_the_system_column_stands_before_whole_conversations() -> None:
    sides = {side: [ASKED, {**SAID, "content": side}] for side in ("chosen", "rejected")}
    row = json.dumps({"system": "Be brief.", "tools": json.dumps(TOOLS), **sides})
    for rendered in template_of("qwen3").preference(row, "x:1", "messages"):
        assert (
            rendered.text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
            and json.dumps(TOOLS[0]) in rendered.text
        )


@pytest.mark.parametrize("column", ["messages", "chosen"])
def test_a_pair_without_a_prompt_is_not_told_to_take_the_answer_for_one(column: str, tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "pairs.jsonl", [{"chosen": "b", "rejected": "c", "score": 1}]))
    run = config(tmp_path, source="preferences_jsonl", paths=[path], chat_template="plain", messages_column=column)
    for refuse in (
        lambda: check_sources(run.model, run.data),
        lambda: prepare_preferences(run.model, run.data, run.objective),
    ):
        with pytest.raises(BadInputError) as refused:
            refuse()
        said = str(refused.value)
        if column == "chosen":
            assert said == "data.messages_column=chosen: holds an answer; name the column of the prompt"
        else:
            assert "pairs.jsonl:1: has no prompt" in said and "chosen" not in said.split("its column: ")[-1]


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ("chat_jsonl", {"conversations": SHAREGPT}),
        ("chat_jsonl", {"prompt": "a?", "completion": "b"}),
        ("preferences_jsonl", {"prompt": "a?", "chosen": "b", "rejected": "c"}),
        ("unpaired_jsonl", {"messages": [ASKED, SAID], "label": True}),
    ],
)
def test_a_misspelt_column_is_refused_though_another_form_is_there(source: str, row: Any, tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    run = config(tmp_path, source=source, paths=[path], chat_template="plain", messages_column="mesages")
    with pytest.raises(BadInputError) as refused:
        check_sources(run.model, run.data)
    assert ": has no column 'mesages'; set data.messages_column to one that is there: " in str(refused.value)


def test_a_role_that_nobody_knows_is_noted() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    template.conversation(
        json.dumps({"messages": [ASKED, {"role": "Narrator", "content": "x"}, SAID]}), "x:1", "messages"
    )
    assert "message 2 has the role 'Narrator'" in template.first_odd


@pytest.mark.parametrize("arguments", [[1], 3, "no JSON", "[1]", True])
def test_arguments_that_are_no_object_are_refused(arguments: object) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(DataError, match="row 1: the arguments of 'add' in message 2 must be an object"):
        calls_of([call], 2, "row 1")


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', "{}", "", None])
def test_arguments_that_are_an_object_are_taken(arguments: object) -> None:
    assert calls_of([{"name": "add", "arguments": arguments}], 2, "row 1") is not None


def test_a_prompt_next_to_whole_conversations_is_one_of_their_messages() -> None:
    asked = {"role": "user", "content": "How many?"}
    row = {side: [asked, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    for prompt in ("How many? ", [asked], row["chosen"]):
        assert preference_of({**row, "prompt": prompt}, "row 1", "messages")[0][0]["content"] == "How many?"
    for prompt in ("How much?", [{"role": "user", "content": "How much?"}]):
        with pytest.raises(DataError, match=r"row 1: no message of chosen is column 'prompt' \('How much\?'\)"):
            preference_of({**row, "prompt": prompt}, "row 1", "messages")


@pytest.mark.parametrize(
    "row",
    [
        {side: f"\n\nHuman: a?\n\nAssistant: {side}" for side in ("chosen", "rejected")},
        {
            "input": {"messages": [ASKED], "tools": TOOLS, "parallel_tool_calls": True},
            "preferred_output": [{**SAID, "content": "chosen"}],
            "non_preferred_output": [{**SAID, "content": "rejected"}],
        },
        {"prompt": "a?", "chosen_response": "chosen", "rejected_response": "rejected"},
        {
            "prompt": "a?",
            "messages": [ASKED, {**SAID, "content": "chosen"}],
            "chosen": "chosen",
            "rejected": "rejected",
        },
        {
            "prompt": [{"role": "human", "content": "a?"}],
            **{side: [{"role": "model", "content": side}] for side in ("chosen", "rejected")},
        },
        {"prompt": "\n\nHuman: a?\n\nAssistant:", "chosen": " chosen", "rejected": " rejected"},
        {
            "prompt": "\n\nHuman: a?\n\nAssistant:",
            **{side: f"\n\nHuman: a?\n\nAssistant: {side}" for side in ("chosen", "rejected")},
        },
        {
            "prompt": json.dumps([ASKED]),
            **{side: json.dumps([{**SAID, "content": side}]) for side in ("chosen", "rejected")},
        },
        {"messages": [ASKED, {**SAID, "content": "chosen"}], "rejected_response": "rejected"},
        {
            "messages": [ASKED, {**SAID, "content": "chosen"}],
            "rejected_messages": [ASKED, {**SAID, "content": "rejected"}],
        },
    ],
    ids=["HH-RLHF", "OpenAI", "Argilla", "UltraFeedback", "roles", "prompts of HH-RLHF", "HH-RLHF with its prompts"]
    + ["JSON texts", "ms-swift", "ms-swift's conversations"],
)
def test_pairs_of_other_forms_are_read(row: dict[str, Any]) -> None:
    template = template_of("qwen3")
    both = template.preference(json.dumps(row), "x:1", "messages")
    for side, rendered in zip(("chosen", "rejected"), both, strict=True):
        [(begin, end)] = rendered.spans
        assert rendered.text[begin:end].removeprefix("<think>\n\n</think>\n\n") == f"{side}<|im_end|>"
        assert rendered.text.count("a?<|im_end|>") == 1 and rendered.text.count("chosen") == (side == "chosen")
        assert ("# Tools" in rendered.text) == ("input" in row)
    assert not template.notes.summary().startswith("columns")


def test_a_conversation_with_its_answer_is_no_prompt() -> None:
    with pytest.raises(DataError, match="the prompt in column 'messages' ends with an answer; leave the answer out"):
        preference_of({"messages": [ASKED, SAID], "chosen": "a", "rejected": "b"}, "row 1", "messages")


def test_the_columns_of_a_missing_prompt_are_named_once() -> None:
    with pytest.raises(DataError, match=r"has no prompt \(no column messages, prompt, conversations, ") as error:
        preference_of({"chosen": "a", "rejected": "b"}, "row 1", "messages")
    assert str(error.value).count("messages") == 1


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"prompt": "a?", "input": "c"}, "input"),
        ({"prompt": [ASKED], "history": [["c?", "d"]]}, "history"),
        ({"prompt": "a?", "instruction": "c"}, "instruction"),
        ({"prompt": "a?", "system": "Be brief.", "system_prompt": "Be kind."}, "system_prompt"),
        ({"question": "a?", "context": "c"}, "context"),
        ({"instruction": "a?", "context": "c"}, ""),
        ({"prompt": "a?", "question": "a? ", "messages": [ASKED, SAID], "history": [["c?", "d"]]}, ""),
    ],
)
def test_a_text_that_no_conversation_holds_is_noted(row: dict[str, Any], unread: str) -> None:
    template = template_of("qwen3")
    template.preference(json.dumps({**row, "chosen": "b", "rejected": "c!"}), "x:1", "messages")
    template.with_label(json.dumps({**row, "completion": "b", "label": True}), "x:1", "messages")
    assert sorted(template.notes.unused) == [unread] * bool(unread)


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"prompt": "a?", "response_0": "b", "response_1": "c", "better_response_id": 1}, "response_0 and response_1"),
        ({"model_a": "x", "model_b": "y", "reply_a": "long", "reply_b": "longer"}, "reply_a and reply_b"),
        ({"prompt": "a?", "completion": "b", "label": True}, "data=unpaired_jsonl, for objective=kto"),
        ({"prompt": "a?", "answers": [{"answer": "b", "rank": 1}, {"answer": "c", "rank": 2}]}, "two of answers as"),
        ({"prompt": "a?", "winner": "b", "loser": "c"}, "name the two answers 'chosen' and 'rejected'"),
        ({"prompt": "a?", **{side: str([SAID]) for side in ("chosen", "rejected")}}, "write it by json.dumps"),
    ],
)
def test_rows_of_unread_forms_name_the_fix(row: dict[str, Any], fix: str) -> None:
    with pytest.raises(DataError, match=f"^row 1: .*{fix}"):
        preference_of(row, "row 1", "messages")


def test_margins_are_read_and_scores_can_become_some() -> None:
    row = {"prompt": "a?", "chosen": "b", "rejected": "c", "chosen_score": 2.0, "rejected_score": 1.0}
    for margin, said in (({}, "add a column 'margin', chosen_score less rejected_score"), ({"margin": 1.0}, "")):
        template = template_of("qwen3")
        template.preference(json.dumps({**row, **margin}), "x:1", "messages")
        summary = summarize_margins(template.notes)
        assert "columns that are not used: chosen_score, rejected_score (first" in summary
        assert ("'margin'" in summary) == (margin == {}) and said in summary
        assert margin == {} or "margin" in template.notes.summary()
