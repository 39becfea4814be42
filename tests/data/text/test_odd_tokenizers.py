"""Tokenizer files that parse and do not fit: one line from every verb that reads them, and never a stack."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mgpu_pipe.cli import main as cli
from mgpu_pipe.data.text.document_encoder import Encoder, EncoderSpec
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_folder import FILES, chat_of, check_tokenizer, token_differences
from mgpu_pipe.errors import BadInputError
from tests.data.support import config
from tests.data.text.tokenizer_kinds import write_kind
from tests.data.text.written import EOS
from tests.support.tiny import COMMON

TOKENIZER, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TOKEN = {
    "id": 5, "content": "<x>", "special": True, "lstrip": False, "rstrip": False, "normalized": False,
    "single_word": False,
}  # fmt: skip


def odd_files(whole: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Files' names, and what stands in each."""
    model, texts = whole["model"], list(whole["model"]["vocab"])
    for name in (TOKENIZER, SETTINGS, SPECIAL, "chat_template.json"):
        yield from ((name, value) for value in ([], 3, "x"))
    yield from ((TOKENIZER, value) for value in ({}, {"model": None}, {"model": {}}, {"added_tokens": [[]]}))
    yield from (("added_tokens.json", value) for value in ({"a": "x"}, {"a": -1}, {"a": [1]}))
    for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "truncation"):
        yield from ((TOKENIZER, {**whole, key: value}) for value in (3, [[1]], {"type": 5}))
    for key, value in (("vocab", [1]), ("vocab", "x"), ("merges", {}), ("merges", [["a", 1]]), ("unk_token", 3),
                       ("type", []), ("type", "Odd")):  # fmt: skip
        yield TOKENIZER, {**whole, "model": {**model, key: value}}
    for value in (None, "x", 1.5, True, [1], -1, 2**32, 10**400, model["vocab"][texts[1]]):
        yield TOKENIZER, {**whole, "model": {**model, "vocab": {**model["vocab"], texts[0]: value}}}
    for key, value in (("id", -1), ("id", 2**32), ("id", "x"), ("id", None), ("content", 3), ("content", ""),
                       ("special", "x"), ("lstrip", None)):  # fmt: skip
        yield TOKENIZER, {**whole, "added_tokens": [*whole["added_tokens"], {**TOKEN, key: value}]}
    twice = [*whole["added_tokens"], TOKEN, {**TOKEN, "content": "<y>"}]
    yield TOKENIZER, {**whole, "added_tokens": twice}
    for key, value in (("eos_token", 3), ("eos_token", {"content": 3}), ("eos_token", "odd"), ("chat_template", 3),
                       ("chat_template", [{"name": "default"}]), ("chat_template", ["x"]),
                       ("added_tokens_decoder", []), ("added_tokens_decoder", {"x": TOKEN}),
                       ("added_tokens_decoder", {"5": 3}), ("extra_special_tokens", 3),
                       ("additional_special_tokens", [3]), ("model_max_length", "x"), ("tokenizer_class", 3),
                       ("padding_side", 3), ("add_bos_token", "x")):  # fmt: skip
        yield SETTINGS, {"eos_token": EOS, key: value}


def readers(model: Path, cache: Path) -> Iterator[Callable[[], object]]:
    """How verbs read a folder's tokenizer: a run, its check and data; generate, export and import."""
    run = config(cache, tokenizer=str(model))

    def prepare() -> None:
        known = resolve_tokenizer(run.model, run.data, run.objective, [], cache)
        encoder = Encoder(EncoderSpec(str(known.folder / TOKENIZER), known.eos_token_id, known.vocab_size))
        encoder.encode([Document("the house \u0416 12", "here", 1)])

    yield prepare
    yield lambda: (check_tokenizer(model), chat_of(model), token_differences(model, model))


def one_line(work: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether it refuses in one line; it writes nothing else."""
    try:
        work()
    except BadInputError as error:
        assert "\n" not in str(error), error
    else:
        return False
    assert capfd.readouterr().err == ""
    return True


def test_files_that_do_not_fit_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (model := tmp_path / "model").mkdir()
    write_kind("byte-level", model)
    kept = {name: (model / name).read_bytes() for name in FILES if (model / name).is_file()}
    cases = list(odd_files(json.loads(kept[TOKENIZER])))
    assert len(cases) >= 60
    for name, value in cases:
        for other in FILES:
            (model / other).unlink(missing_ok=True)
        for other, content in kept.items():
            (model / other).write_bytes(content)
        (model / name).write_text(json.dumps(value))
        refused = [one_line(work, capfd) for work in readers(model, tmp_path / "cache")]
        assert any(refused), (name, str(value)[-200:])


@pytest.mark.parametrize("verb", ["check", "data", "generate", "import"])
def test_verbs_refuse_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str):
    (model := tmp_path / "model").mkdir()
    write_kind("byte-level", model)
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **COMMON, "vocab_size": 1000}))
    save_file({"a": np.zeros(1, np.float32)}, model / "model.safetensors")
    (tmp_path / "text.txt").write_text("the house\n" * 20)
    whole = json.loads((model / TOKENIZER).read_text())
    whole["added_tokens"].append({**TOKEN, "id": [5]})
    (model / TOKENIZER).write_text(json.dumps(whole))
    run = ["model=hf", f"model.path={model}", "data=text_files", f"data.paths=[{tmp_path / 'text.txt'}]",
           f"data.cache_dir={tmp_path / 'cache'}", "data.seq_len=16", "logger=none"]  # fmt: skip
    words = {
        "check": ["check", *run],
        "data": ["data", *run],
        "generate": ["generate", str(model), "--prompt", "the"],
        "import": ["import", "--from", str(model / "model.safetensors"), "--tokenizer", str(model),
                   "--out", str(tmp_path / "out"), *run[:2]],
    }  # fmt: skip
    assert cli.main(words[verb]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and "'added_tokens' has to be a list" in told


def test_a_word_without_a_token_is_one_line(tmp_path: Path):
    write_kind("wordpiece", tmp_path)
    whole = json.loads((tmp_path / TOKENIZER).read_text())
    whole["model"]["unk_token"] = "<nowhere>"
    (tmp_path / TOKENIZER).write_text(json.dumps(whole))
    encoder = Encoder(EncoderSpec(str(tmp_path / TOKENIZER), 2, 400))
    with pytest.raises(BadInputError, match="cannot encode a text: WordPiece error: Missing"):
        encoder.encode([Document("the house \u0416", "here", 1)])
