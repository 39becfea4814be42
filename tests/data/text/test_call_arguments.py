"""Arguments of tool calls, as objects or as JSON strings, under templates that take one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_folder import CONFIG, chat_of, chat_template
from mgpu_pipe.models.weights.model_files import write_tokenizer
from tests.data.support import CHATML, config
from tests.support.real_folders import need_chat_templates

ARGUMENTS = {"city": "Zürich", "days": 3}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
QWEN25 = """{{- '{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}' }}"""
DEEPSEEK = "{{- call['name'] + '\\n' + '```json' + '\\n' + call['arguments'] + '\\n' + '```' }}"
ITEMS = "{%- for key, value in call.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
TEMPLATE = (
    "{%% for message in messages %%}<{{ message.role }}>{{ message.content or '' }}"
    "{%% for call in message.tool_calls or [] %%}{%% set call = call.function or call %%}%s{%% endfor %%}"
    "<end>\n{%% endfor %%}{%% if add_generation_prompt %%}<assistant>{%% endif %%}"
)


def row(arguments: object, wrapped: bool = True, content: str | None = None) -> str:
    function: dict[str, Any] = {"name": "weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function} if wrapped else function
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "sun", "name": "weather", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "Sun."},
    ]
    return json.dumps({"messages": messages})


def rendered(template: ChatTemplate, arguments: object, wrapped: bool = True) -> tuple[str, list[str]]:
    text, spans, *_ = template.conversation(row(arguments, wrapped), "f:1", "messages")
    return text, [text[start:end] for start, end in spans]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    ("write", "expected", "empty"),
    [
        (QWEN25, f'{{"name": "weather", "arguments": {WRITTEN}}}', '{"name": "weather", "arguments": {}}'),
        (DEEPSEEK, f"weather\n```json\n{WRITTEN}\n```", "weather\n```json\n{}\n```"),
        (ITEMS, "city=Zürich;days=3;", ""),
    ],
    ids=["qwen2.5", "deepseek", "items"],
)
def test_either_form_of_arguments_is_written_as_the_template_wants_it(
    write: str, expected: str, empty: str, wrapped: bool
) -> None:
    template = ChatTemplate(TEMPLATE % write, {"eos_token": "<end>"}, ("<end>",))
    for arguments in (ARGUMENTS, WRITTEN):
        text, said = rendered(template, arguments, wrapped)
        assert f"<assistant>{expected}<end>" in text and said[0] == f"{expected}<end>"
    assert f"<assistant>{empty}<end>" in rendered(template, {}, wrapped)[0]


def test_a_template_that_takes_both_is_given_what_the_row_holds() -> None:
    both = "{{ call.arguments if call.arguments is string else call.arguments | tojson }}"
    template = ChatTemplate(TEMPLATE % both)
    spaced = WRITTEN.replace(", ", " ,")
    assert spaced in rendered(template, spaced)[0] and WRITTEN in rendered(template, ARGUMENTS)[0]


@pytest.mark.slow
def test_published_templates_write_either_form_alike() -> None:
    """Of all that write calls, those that take objects alone, strings alone, and both."""
    forms: dict[str, list[str]] = {}
    for file in sorted(need_chat_templates().glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        dated = file.stem == "gptoss"  # asks for the date, which is not given
        if "tool_calls" in source and not dated and not file.stem.endswith("_training"):
            template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
            content = None if file.stem.startswith("deepseek") else ""  # others fail without a text
            both = (row(arguments, content=content) for arguments in (ARGUMENTS, WRITTEN))
            messages = [json.loads(line)["messages"] for line in both]
            texts = [template.render(one) for one in messages]
            assert texts[0] == texts[1] and "Zürich" in texts[0] and "\\" not in texts[0], file.stem
            forms.setdefault(str(template.arguments), []).append(file.stem)
    assert {"qwen2_5", "llama3_1", "glm4moe"} <= {*forms["object"]}
    assert {"deepseekv3"} <= {*forms["string"]} and {"qwen3"} <= {*forms["None"]}


def test_a_conversation_with_tools_gets_the_folders_template_for_tools(tmp_path: Path) -> None:
    """Hermes' and Command R's folders hold both templates; transformers chooses alike."""
    # Jinja drops the last line break of a template, and keeps the first.
    plain = "\n" + TEMPLATE.partition("{%% for call")[0].replace("%%", "%") + "<end>\n{% endfor %}.\n"
    named = {"default": plain, "tool_use": "{{ tools | tojson }}\n" + TEMPLATE % QWEN25}
    listed = [{"name": name, "template": source} for name, source in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    template = ChatTemplate(chat_template(tmp_path) or "", {"eos_token": "<end>"}, ("<end>",))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    for arguments in (ARGUMENTS, WRITTEN):
        line = json.dumps({**json.loads(row(arguments)), "tools": [tool]})
        text, spans, *_ = template.conversation(line, "f:1", "messages")
        assert text.startswith(json.dumps([tool]) + "\n<user>")
        assert next(text[start:end] for start, end in spans) == f'{{"name": "weather", "arguments": {WRITTEN}}}<end>'
    ends = ChatTemplate(plain, {"eos_token": "<end>"}, ("<end>",))
    asked = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    assert template.conversation(asked, "f:1", "messages") == ends.conversation(asked, "f:1", "messages")


@pytest.mark.parametrize("default", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_the_named_templates_of_a_folder_render_and_travel_as_in_transformers(tmp_path: Path, default: str) -> None:
    """transformers saves a dict of templates as chat_template.jinja and files in additional_chat_templates."""
    named = {"default": CHATML, "tool_use": "{{ tools | tojson }}\n" + CHATML, "rag": "{{ documents }}"}
    words, folder = Tokenizer(models.WordLevel({"a": 0, "</s>": 1})), tmp_path / "words"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    tokenizer.chat_template = named
    tokenizer.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    if default != "chat_template.jinja":
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / CONFIG).read_text()) if default == CONFIG else {}
        (folder / default).write_text(json.dumps({**settings, "chat_template": CHATML}))
    run = config(tmp_path, tokenizer=str(folder))
    made = resolve_tokenizer(run.model, run.data, run.objective, [], tmp_path / "cache").folder
    for out in (tmp_path / "of_run", tmp_path / "of_folder"):
        out.mkdir()
        write_tokenizer(made if out.name == "of_run" else folder, out, False)
    talk = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for place in (folder, made, tmp_path / "of_run", tmp_path / "of_folder"):
        template = chat_of(place)
        assert template is not None
        for given in (tools, None):
            expected = tokenizer.apply_chat_template(talk, tools=given, tokenize=False)
            assert template.render(talk, given) == expected, place
        if place != folder and (place == made or default == "chat_template.jinja"):
            assert AutoTokenizer.from_pretrained(place).chat_template == named
    if default == "chat_template.jinja":
        listed = json.loads((tmp_path / "of_folder" / CONFIG).read_text())["chat_template"]
        assert {entry["name"]: entry["template"] for entry in listed} == named, "transformers 4 reads them there"
