"""What is trained of conversations, against an independent writer, for tokenizers of four kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers.modeling_outputs import CausalLMOutput

from mgpu_pipe.data.text.chat_templates import SPECIAL
from mgpu_pipe.data.text.prepare_text import PreparedData, prepare
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.inference.generation import encode, generate_text, load_tokenizer
from mgpu_pipe.models.build import build_meta, materialise
from tests.data.support import config, write_jsonl
from tests.data.text.tokenizer_kinds import END_OF_TEXT, KINDS, text_of, write_kind
from tests.data.text.written import EOS, WRITERS, drawn
from tests.models.tiny import tiny_model

DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nBe of help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAIRS = [(name, kind) for name in SPECIAL for kind in KINDS] + [("default system", "qwen")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_kind(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_the_assistants_words_are_trained_and_nothing_else(
    name: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    _check(name, kind, folders[kind], tmp_path, 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_10_000_conversations(name: str, kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    _check(name, kind, folders[kind], tmp_path, -(-10_000 // len(PAIRS)))


def _check(name: str, kind: str, folder: Path, tmp_path: Path, number: int) -> None:
    """Prepares conversations, and reads the tokens back."""
    rows = [drawn(name, seed, unicode=kind in ("byte-level", "qwen")) for seed in range(number)]
    template = name
    if name not in SPECIAL:
        template = str(tmp_path / "own.jinja")
        Path(template).write_text(DEFAULT_SYSTEM, encoding="utf-8")
    run = config(
        tmp_path,
        source="chat_jsonl",
        paths=[str(write_jsonl(tmp_path / "chat.jsonl", rows))],
        tokenizer=str(folder),
        chat_template=template,
        seq_len=4096,
        validation_fraction=0.0,
    )
    run.model.config = {"vocab_size": 2000}
    prepared = prepare(run)
    tokenizer, chat = load_tokenizer(prepared.tokenizer_folder), chat_of(prepared.tokenizer_folder)
    read, store = (
        Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json")),
        TokenStore.open(prepared.folder),
    )
    assert store.loss_mask is not None and chat is not None and store.num_documents == number
    compared = 0
    for row, first, end in zip(rows, store.offsets[:-1], store.offsets[1:], strict=True):
        ids, mask = store.tokens[first:end].tolist(), store.loss_mask[first:end].tolist()
        pieces = WRITERS[name](row["messages"], row.get("tools"))
        pieces = [(text.replace(EOS, END_OF_TEXT[kind]), trained) for text, trained in pieces]
        written = "".join(text for text, _ in pieces)
        assert text_of(kind, read, ids).startswith(_seen(kind, written)), row
        expected = [_seen(kind, text) for text, trained in _joined(pieces) if trained]
        trained = [text_of(kind, read, list(run)) for run in _runs(ids, mask)]
        assert trained == [text for text in expected if text], row
        if "tools" not in row:  # a model of the run is asked without tools
            compared += _compare_prompts(tokenizer, chat, row["messages"], pieces, ids, mask)
    assert compared > 0


def _seen(kind: str, text: str) -> str:
    """What can be read back of a text: WordPiece knows no capitals, and it and Unigram do not keep spaces apart."""
    if kind == "wordpiece":
        text = text.lower()
    return text if kind in ("byte-level", "qwen") else "".join(text.split())


def _joined(pieces: list[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Without empty pieces, those that are alike put together."""
    for trained, several in groupby((piece for piece in pieces if piece[0]), key=lambda piece: piece[1]):
        yield "".join(text for text, _ in several), trained


def _runs(ids: list[int], mask: list[int]) -> Iterator[tuple[int, ...]]:
    for trained, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        if trained:
            yield tuple(number for number, _ in run)


def _compare_prompts(tokenizer, chat, messages, pieces, ids, mask) -> int:  # type: ignore[no-untyped-def]
    """That generation asks with the tokens that training has before an answer."""
    compared, written = 0, ""
    begins = (np.flatnonzero(np.diff([0, *mask]) == 1)).tolist()
    prompts = []
    for text, trained in _joined(pieces):
        if trained:
            prompts.append(written)
        written += text
    assert len(prompts) == len(begins)
    asked = {chat.prompt(messages[:number]): messages[:number] for number in _askable(messages)}
    for prompt, begin in zip(prompts, begins, strict=True):
        if prompt in asked:
            assert encode(tokenizer, asked[prompt], chat) == ids[:begin], json.dumps(messages)
            compared += 1
    return compared


def _askable(messages: list[dict[str, object]]) -> list[int]:
    """Where an answer may be asked for: after a user's message."""
    return [number for number in range(1, len(messages)) if messages[number - 1]["role"] == "user"]


OWN = (
    "{% for message in messages %}{{ message.role | capitalize + ': ' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""The prompt ends with the space that most tokenizers join with the word after it."""


def _prepared(folder: Path, tmp_path: Path, template: str, rows: list[object]) -> PreparedData:
    if "{" in template:
        (tmp_path / "own.jinja").write_text(template, encoding="utf-8")
        template = str(tmp_path / "own.jinja")
    path = str(write_jsonl(tmp_path / "chat.jsonl", rows))
    run = config(tmp_path, source="chat_jsonl", paths=[path], tokenizer=str(folder), chat_template=template)
    run.model.config, run.data.validation_fraction = {"vocab_size": 2000}, 0.0
    return prepare(run)


def _read(prepared: PreparedData, kind: str) -> list[tuple[list[int], str]]:
    """Of each conversation the tokens before its first answer, and what is trained."""
    tokenizer, store = (
        Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json")),
        TokenStore.open(prepared.folder),
    )
    assert store.loss_mask is not None
    read = []
    for first, end in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        ids, mask = store.tokens[first:end], store.loss_mask[first:end].astype(bool)
        read.append((ids[: int(mask.argmax())].tolist(), text_of(kind, tokenizer, ids[mask].tolist())))
    return read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [OWN, "plain"], ids=["own", "plain"])
def test_one_word_is_trained_whole_after_the_prompt_of_generation(
    template: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    asked, said = {"role": "user", "content": "who"}, {"role": "assistant", "content": "Hello"}
    first = {"role": "user", "content": "Hello"}
    prepared = _prepared(
        folders[kind], tmp_path, template, [{"messages": [asked, said]}, {"messages": [first, said] * 2}]
    )
    tokenizer, chat = load_tokenizer(prepared.tokenizer_folder), chat_of(prepared.tokenizer_folder)
    whole = _seen(kind, " Hello" if template == "plain" else "Hello") + END_OF_TEXT[kind]
    (before, trained), (_, both) = _read(prepared, kind)
    assert (trained, both) == (whole, whole * 2)
    assert before == encode(tokenizer, [asked], chat)
    # These have a token of the space and the word.
    crossed = template == OWN and kind in ("byte-level", "qwen")
    assert ("generation prompt ends inside a token of the answer in 2 conversations" in prepared.told) == crossed


@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_the_templates_space_is_no_part_of_a_generated_answer(
    template: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The model repeats what it was trained on, which begins with a space under plain."""
    asked, said = {"role": "user", "content": "who"}, {"role": "assistant", "content": "Hello"}
    prepared = _prepared(folders["byte-level"], tmp_path, template, [{"messages": [asked, said]}])
    trained = TokenStore.open(prepared.folder).tokens
    tokenizer, chat = load_tokenizer(prepared.tokenizer_folder), chat_of(prepared.tokenizer_folder)
    model = materialise(build_meta(tiny_model("llama", vocab_size=len(tokenizer))), 0, "cpu")

    def repeat(input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        after = torch.as_tensor(trained[1 : input_ids.shape[1] + 1].astype(np.int64))
        return CausalLMOutput(logits=torch.nn.functional.one_hot(after, len(tokenizer)).float()[None])

    assert generate_text(model, tokenizer, [[asked]], chat=chat, temperature=0.0, forward=repeat) == ["Hello"]


def test_a_tokenizer_that_cuts_and_pads_gives_whole_prompts(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "cuts"
    shutil.copytree(folders["wordpiece"], folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9, pad_id=0, pad_token="[UNK]")
    tokenizer.save(str(folder / "tokenizer.json"))
    for number, words in enumerate(("who", "who " * 20)):
        asked, said = {"role": "user", "content": words}, {"role": "assistant", "content": "Hello"}
        below = tmp_path / str(number)
        below.mkdir()
        prepared = _prepared(folder, below, "chatml", [{"messages": [asked, said]}])
        loaded, chat = load_tokenizer(prepared.tokenizer_folder), chat_of(prepared.tokenizer_folder)
        assert encode(loaded, [asked], chat) == _read(prepared, "wordpiece")[0][0]


def test_the_first_turn_is_the_assistants_without_the_templates_own_system_message(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    said = {"role": "assistant", "content": "Hello"}
    rows = [{"messages": [said]}, {"messages": [said, {"role": "user", "content": "who"}, said]}]
    read = _read(_prepared(folders["qwen"], tmp_path, DEFAULT_SYSTEM, rows), "qwen")
    assert [trained for _, trained in read] == ["Hello<|im_end|>", "Hello<|im_end|>" * 2]


def test_marks_of_a_template_reach_no_prompt_and_end_with_the_turn(folders: dict[str, Path], tmp_path: Path) -> None:
    marked = DEFAULT_SYSTEM.replace(
        "message.content + '<|im_end|>\n' }}{% endfor %}",
        "'' }}{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}"
        "{% endgeneration %}{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}",
    )
    talk = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "Hello"}]
    prepared = _prepared(folders["qwen"], tmp_path, marked, [{"messages": talk}])
    chat = chat_of(prepared.tokenizer_folder)
    assert chat is not None and chat.turn_end() == "<|im_end|>"
    assert not set("\ufdd0\ufdd1\ufdd2") & set(chat.prompt([*talk, talk[0]]))
    assert _read(prepared, "qwen")[0][1] == "Hello<|im_end|>"


def test_an_end_that_only_earlier_turns_have_is_trained(folders: dict[str, Path], tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if not loop.last %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    talk = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "Hello"}]
    read = _read(_prepared(folders["byte-level"], tmp_path, template, [{"messages": talk * 2}]), "byte-level")
    assert read[0][1] == "Hello</s>" * 2
