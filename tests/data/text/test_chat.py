"""Conversations: which characters and tokens the assistant said, for templates of several kinds."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mgpu_pipe.data import files
from mgpu_pipe.data.files import read_lines
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text import template_limits
from mgpu_pipe.data.text.answer_finder import common_prefix
from mgpu_pipe.data.text.chat_templates import check_chat
from mgpu_pipe.data.text.packed_dataset import PackedDataset
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigError, DataError
from tests.data.support import CHATML, config, sentences, write_jsonl
from tests.support.sampling import one_in

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Hi. Who?"},
    {"role": "assistant", "content": "Me: <Hi.> \u00e9\U0001f600"},
]
# Strips contents and ends turns by a plain newline.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
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
# Writes the next answer's header whether or not it is asked for, as Llama 3's first template does.
ALWAYS_ASKS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}{{ '<|start|>assistant\n' }}"
)
# Writes more spaces before a header where it only asks for an answer.
OTHER_SPACES = CHATML.replace("<|im_start|>a", "  <|im_start|>a")
# Marks the end of text after the last answer apart, as TRL's template for Phi-3 does.
MARKED_END = GENERATION + "{% generation %}</s>{% endgeneration %}"
REFUSES_SYSTEM_ALONE = (
    "{% if messages[0].role == 'system' and messages | length < 2 %}{{ raise_exception('user first') }}{% endif %}"
    + CHATML
)


def _said(source: str, talk: list[dict[str, str]], **options: object) -> list[str]:
    template = ChatTemplate(source, {"eos_token": "</s>"}, ("<|im_end|>",))
    text, spans, *_ = template.conversation(json.dumps({"messages": talk, **options}), "f:1", "messages")
    assert text == template.render(talk)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, ["Hi.<|im_end|>", TALK[4]["content"] + "<|im_end|>"]),
        (REFUSES_SYSTEM_ALONE, ["Hi.<|im_end|>", TALK[4]["content"] + "<|im_end|>"]),
        (ALWAYS_ASKS, ["Hi.<|im_end|>", TALK[4]["content"] + "<|im_end|>"]),
        (OTHER_SPACES, ["Hi.<|im_end|>", TALK[4]["content"] + "<|im_end|>"]),
        (PLAIN, ["Hi.\n", TALK[4]["content"] + "\n"]),
        (REASONING, ["Hi.<|im_end|>", "<think>\n</think>\n\n" + TALK[4]["content"] + "<|im_end|>"]),
    ],
)
def test_the_spans_are_what_the_template_adds_for_the_assistant(source: str, expected: list[str]) -> None:
    assert _said(source, TALK) == expected


def test_marks_of_answers_that_the_loss_leaves_out_are_left_out() -> None:
    talk = [*TALK[1:2], {**TALK[2], "weight": 0}, *TALK[3:]]
    for source, expected in ((GENERATION, TALK[4]["content"] + "#"), (MARKED_END, TALK[4]["content"] + "#")):
        assert _said(source, talk)[0] == expected


def test_a_template_that_writes_the_date_writes_the_same_every_day() -> None:
    assert _said("{{ strftime_now('%d %B %Y') }} " + PLAIN, TALK)[0] == "Hi.\n"
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert text == "2026-01-01"
    own = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    assert ChatTemplate(own).render([]) == "2024"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_written_whatever_its_field_is_called(name: str) -> None:
    talk = [TALK[1], {**TALK[2], name: "a greeting"}]
    for read in ("thinking", "reasoning_content"):
        source = f"{{% for m in messages %}}({{{{ m.{read} }}}}){{{{ m.content }}}}{{% endfor %}}"
        assert "(a greeting)Hi." in ChatTemplate(source).render(talk)


def test_contents_that_the_template_trims_or_cuts_are_found() -> None:
    talk = [TALK[1], {"role": "assistant", "content": " <think>\nwhy\n</think>\n\nBecause. "}, TALK[3], TALK[4]]
    assert _said(REASONING, talk)[0] == "Because. <|im_end|>"
    assert _said(PLAIN, [TALK[1], {"role": "assistant", "content": "  x "}]) == ["x\n"]


def test_a_template_may_mark_what_is_generated_itself() -> None:
    template = ChatTemplate(GENERATION)
    text, spans, *_ = template.conversation(json.dumps({"messages": TALK}), "f:1", "messages")
    assert text == "[system]Be brief.[user]Hello?[assistant]Hi.#[user]Hi. Who?[assistant]" + TALK[4]["content"] + "#"
    assert [text[start:end] for start, end in spans] == ["Hi.#", TALK[4]["content"] + "#"]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": []}, "must be a list of messages"),
        ({"messages": "hello"}, "must be a list of messages, .*; its text is no JSON: write it by json.dumps"),
        (
            {"messages": [{"from": "Ann", "text": "hi"}]},
            "content of message 1 must be .*; its fields: role, content, text",
        ),
        ({"messages": [{"content": "x"}]}, "message 1 is not an object with a role"),
        ({"messages": [{"sender": "bot", "text": "x"}]}, "rename its fields to role and content: sender, text"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, r"rows of token ids \(input_ids\) are not read: give their texts"),
        ({"title": "a", "mapping": {}, "results": []}, "but title, mapping, results; rename its columns"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "rejected; pairs are read by data=preferences_jsonl"),
        (
            {"prompt": str([TALK[1]]), "completion": str([TALK[2]])},
            "column 'prompt' holds messages as a text that is no",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of message 1 must be a string"),
        ({"messages": TALK[:2]}, r"no message has the role assistant \(roles: system, user\).*; rename the roles to"),
        ({"chat": TALK, "id": 2}, "no column 'messages'; set data.messages_column to one that is there: chat$"),
        (
            {"title": "a", "body": "b"},
            r"no column 'messages' \(nor conversations, .*\) but title, body; rename its columns, or write",
        ),
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
    run = config(
        tmp_path,
        source="chat_jsonl",
        paths=[str(path)],
        chat_template=str(tmp_path / "chat.jinja"),
        seq_len=512,
        packing="none",
    )
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
    expected = [(ChatTemplate(CHATML).render(talk), talk[1]["content"] + "<|im_end|>\n<|endoftext|>") for talk in talks]
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
            assert common_prefix(one, other) == common_prefix(other, one) == min(same, length)
    assert common_prefix("ab", "abc") == 2


GROWS = (
    "{% set n = namespace(v=START) %}{% for i in range(200) %}{% set n.v = STEP %}{% endfor %}"
    "{{ n.v | string | length }}"
)
NEST = (
    "{% set n = namespace(v=(), w=()) %}"
    "{% for i in range(60) %}{% set n.v = (n.v, n.v) %}{% set n.w = (n.w, n.w) %}{% endfor %}"
)
ONE_CALL = {
    "a search from the end": "{{ ('a' * 4000000).rfind('a' * 1000000 + 'b' + 'a' * 1000000) }}",
    "a split from the end": "{{ ('a' * 4000000).rsplit('a' * 1000000 + 'b' + 'a' * 1000000) }}",
    "a partition from the end, by a keyword": "{{ ('a' * 4000000).rsplit(sep='a' * 1000000 + 'b' + 'a' * 1000000) }}",
    "a strip of many letters": "{{ ('b' * 9000000).strip('a' * 9000000 + 'b') }}",
    "a trim of many letters": "{{ ('b' * 9000000) | trim('a' * 9000000 + 'b') }}",
    "many beginnings": "{{ ('a' * 9000000).startswith((('a' * 4000000 + 'b' + 'a' * 4000000),) * 9000000) }}",
    "a text among many": "{{ ('a' * 9000000 + 'b') in ['a' * 9000000 + 'c'] * 9000000 }}",
    "a text counted among many": "{{ (['a' * 9000000 + 'c'] * 9000000).count('a' * 9000000 + 'b') }}",
    "a test of a text among many": "{{ ('a' * 9000000 + 'b') is in(['a' * 9000000 + 'c'] * 9000000) }}",
    "two nests compared": NEST + "{{ n.v == n.w }}",
    "a nest as a key": NEST + "{{ {n.v: 1} }}",
    "a nest as an index": NEST + "{{ {1: 1}[n.v] }}",
    "a nest as text": NEST + "{{ 'a' ~ n.v }}",
    "a nest printed": NEST + "{{ n.v }}",
    "a sum of lists": "{{ ([[0] * 9] * 9000000) | sum(start=[]) }}",
    "keys that may have equal hashes": "{{ {}.fromkeys([1]) }}",
    "many digits rounded": "{{ 5 | round(-10**9) }}",
    "many digits rounded up": "{{ 5 | round(10**9, 'ceil') }}",
    "a number of bytes": "{% set read = (0).from_bytes %}"
    "{{ read(('b' * 9000000).encode(), 'big') // read(('b' * 4500000).encode(), 'big') }}",
}
"""Each is one call of C code, which no signal ends."""
HOSTILE = {
    "a long text": "{{ 'a' * 10**10 }}",
    "a long list": "{{ ([0] * 10**9) | length }}",
    "a long text, not known beforehand": "{{ 'a' * (messages | length * 10**10) }}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros that call each other": "{% macro f(g) %}{{ g(f) }}{% endmacro %}{{ f(f) }}",
    "division by zero": "{{ 1 // (messages | length - messages | length) }}",
    "division by zero of constants": "{{ 1 / 0 }}",
    "modulo zero": "{{ 1 % 0 }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a power, not known beforehand": "{{ (messages | length + 9) ** (10 ** 10) }}",
    "a wide field": "{{ '%20000000000d' % 1 }}",
    "a wide format": "{{ '{:20000000000}'.format('a') }}",
    "a wide centre": "{{ 'a' | center(2 * 10**10) }}",
    "a wide text": "{{ 'a'.ljust(2 * 10**10) }}",
    "a text that doubles": GROWS.replace("START", "'a'").replace("STEP", "n.v ~ n.v"),
    "a sum that doubles": GROWS.replace("START", "'a'").replace("STEP", "n.v + n.v"),
    "a list that doubles": GROWS.replace("START", "[1]").replace("STEP", "n.v + n.v"),
    "a number that squares": GROWS.replace("START", "3").replace("STEP", "n.v * n.v"),
    "many words": "{{ lipsum(n=10**8) }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "another file": "{% include '/etc/passwd' %}",
    "another template": "{% extends '/etc/passwd' %}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a number of many digits": "{{ " + "9" * 5000 + " }}",
    "an unknown test": "{{ messages is nonsense }}",
    "an open tag": "{{ messages ",
    "a filter of the wrong type": "{{ messages | int + 'a' }}",
}


@pytest.mark.parametrize("name", one_in(3, HOSTILE))
def test_a_template_that_is_a_bad_program_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the preflight, and so before anything is prepared; and by the preparation, where a later row brings it up."""
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": talk}])
    (tmp_path / "chat.jinja").write_text(HOSTILE[name] + CHATML, encoding="utf-8")
    run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template=str(tmp_path / "chat.jinja"))
    monkeypatch.setattr(template_limits, "SECONDS", 0.5)
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    for refuse in (lambda: check_chat(run.model, run.data), lambda: prepare(run)):
        with pytest.raises((ConfigError, DataError), match=r"chat_template=.*chat\.jinja|chat\.jsonl:1: ") as told:
            refuse()
        assert "\n" not in str(told.value) and len(str(told.value)) < 600
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == limits
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_template_with_one_endless_call_is_refused(name: str) -> None:
    with pytest.raises(TemplateError), template_limits.limit_template():
        ChatTemplate(ONE_CALL[name]).render(TALK)


def test_a_signal_while_the_block_is_left_keeps_no_limit() -> None:
    """A signal is played at each call that leaving the block makes."""
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    calls = []

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        handler = signal.getsignal(signal.SIGPROF)
        if handler != limits[1] and callable(handler):
            calls.append(frame.f_code.co_name)
            handler(signal.SIGPROF, frame)

    try:
        with pytest.raises(TemplateError, match="ZeroDivisionError"), template_limits.limit_template():
            sys.setprofile(interrupt)
            assert 1 / 0
    finally:
        sys.setprofile(None)
    assert {"__exit__", "limit_template"} <= set(calls)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == limits


def test_a_template_that_counts_for_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loops end after some seconds where nothing stops them."""
    template = ChatTemplate("{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}")
    monkeypatch.setattr(template_limits, "SECONDS", 0.05)
    with pytest.raises(TemplateError, match=r"takes more than 0\.05 s"), template_limits.limit_template():
        template.render(TALK)


def test_a_signal_between_two_calls_of_the_block_is_passed_over() -> None:
    """An error there may come after the block's last line, where nothing takes the limits away."""
    with template_limits.limit_template():
        handler = signal.getsignal(signal.SIGPROF)
        assert callable(handler)
        handler(signal.SIGPROF, sys._getframe())


def test_what_is_weighed_gives_what_jinja_gives() -> None:
    """Oracle: Jinja's own sandbox."""
    source = (
        "{% set m = messages %}{{ m | length }}{{ m | map(attribute='role') | join(',') }}{{ [1, 2] | sum }}"
        "{{ m | sum(attribute='n') }}{{ [[1], [2]] | sum(start=[]) }}{{ 2.55 | round(1, 'floor') }}{{ ' a ' | trim }}"
        "{{ 'xax' | trim('x') }}{{ 'a-b-c'.rsplit('-', 1) }}{{ 7 // 2 }}{{ 7 % 4 }}{{ '%s!' % 'a' }}{{ 2 ** -1 }}"
        "{{ 'a' in 'abc' and 'd' not in 'abc' }}{{ 1 < 2 < 3 }}{{ {'a': 1}['a'] }}{{ 1 ~ 'a' ~ none }}{{ absent }}"
        "{{ m | selectattr('role', 'equalto', 'user') | list | length }}{{ m | reverse | first }}{{ 'a' is string }}"
        "{{ '{:>3}'.format(1) }}{{ m | map('length') | sort }}{% if absent is defined %}x{% endif %}"
    )
    messages = [{"role": "user", "n": 1}, {"role": "assistant", "n": 2}]
    expected = ImmutableSandboxedEnvironment().from_string(source).render(messages=messages)
    assert template_limits.LimitedEnvironment().from_string(source).render(messages=messages) == expected


def test_a_tokenizers_own_broken_template_is_refused_by_its_key(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": talk}] * 3)
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template=str(tmp_path / "chat.jinja"))
    own = shutil.copytree(prepare(run).tokenizer_folder, tmp_path / "own")
    (own / "chat_template.jinja").write_text("{{ 'a' * 10**10 ")
    run.data.chat_template, run.data.tokenizer = None, str(own)
    for refuse in (lambda: check_chat(run.model, run.data), lambda: prepare(run)):
        with pytest.raises(ConfigError, match=r"data\.tokenizer=.*own: its chat template cannot be used: line 1"):
            refuse()


@pytest.mark.parametrize("make", ["fifo", "large", "folder", "endless"])
def test_a_template_that_is_no_template_file_is_refused(make: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    {
        "fifo": lambda: os.mkfifo(path),
        "large": lambda: path.write_bytes(b" " * (2 << 20)),
        "folder": path.mkdir,
        "endless": lambda: path.symlink_to("/dev/zero"),
    }[make]()
    run = config(tmp_path, source="chat_jsonl", paths=["none"], chat_template=str(path))
    with pytest.raises(ConfigError, match=r"data\.chat_template=.*(is no plain file|larger than 1 MiB)"):
        check_chat(run.model, run.data)


BAD_LINES = {
    "NaN": '{"messages": [], "score": NaN}',
    "infinity": '{"messages": [], "score": -Infinity}',
    "nesting": '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "half a pair": '{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
    "half a pair in a role": '{"messages": [{"role": "assistant", "content": ""}, {"role": "\\udfff", "content": ""}]}',
    "NUL bytes": "\0\0\0\0",
    "a NUL in a string": '{"messages": "a\0b"}',
    "a second BOM": '\ufeff{"messages": []}',
    "no messages": '{"messages": []}',
    "a mapping": '{"messages": {"role": "user"}}',
    "many digits": '{"messages": ' + "1" * 5000 + "}",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_malformed_row_is_named_by_file_and_line(name: str, tmp_path: Path) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]})
    (tmp_path / "chat.jsonl").write_text("\ufeff" + good + "\n" + BAD_LINES[name] + "\n", encoding="utf-8")
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    run = config(
        tmp_path, source="chat_jsonl", paths=[str(tmp_path / "chat.jsonl")], chat_template=str(tmp_path / "chat.jinja")
    )
    with pytest.raises(DataError, match=r"chat\.jsonl:2: ") as told:
        prepare(run)
    assert "\n" not in str(told.value) and len(str(told.value)) < 600


def test_a_giant_line_is_refused_without_being_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GB that are no bytes on the disk: a hole in the file."""
    monkeypatch.setattr(files, "LONGEST_LINE", 16 << 20)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    os.truncate(path, 10 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"a\.jsonl:2: is longer than 16 MiB"):
        list(read_lines(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB
