"""Tokenizers: trained, imported, refused. Oracle for the folders: transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from mgpu_pipe.checks.check_model import check_tokenizer_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.data_source import open_source
from mgpu_pipe.data.text.heldout_split import document_hash, held_out
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import BadInputError, ConfigError, ModelFolderError
from tests.data.support import CHATML, config, sentences, text_files

ODD_TEXT = "def f(x):\n\treturn  x + 1  # \u00e9\u4e2d\U0001f600 <|endoftext \r\n\n  end."


def _word_tokenizer(folder: Path, words: list[str], settings: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _refusal(run: RunConfig, kind: type[BadInputError], match: str) -> None:
    with pytest.raises(kind, match=match):
        prepare(run)


def test_a_trained_tokenizer_loads_in_transformers_and_gives_text_back(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    prepared = prepare(run)
    assert prepared.vocab_size == 300
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert len(loaded) == 300
    assert loaded.eos_token_id == prepared.eos_token_id == loaded.convert_tokens_to_ids("<|endoftext|>")
    ids = loaded(ODD_TEXT)["input_ids"]
    assert loaded.decode(ids) == ODD_TEXT
    assert ids == Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json")).encode(ODD_TEXT).ids


def test_documents_are_their_tokens_and_the_end_of_text(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    prepared = prepare(run)
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    store = TokenStore.open(prepared.folder)
    texts = [document.text for document in open_source(run, tmp_path / "cache").documents()]
    assert store.num_documents == len(texts) == 20
    for number, text in enumerate(texts):
        tokens = store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()
        assert tokens == [*loaded(text)["input_ids"], prepared.eos_token_id]


def test_training_is_deterministic_and_sees_no_held_out_document(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    texts = {d.origin: d.text for d in open_source(run, tmp_path / "cache").documents()}
    held = held_out(_hashes(list(texts.values())), run.data.validation_fraction)
    first = prepare(run)
    tokenizer = (first.tokenizer_folder / "tokenizer.json").read_bytes()
    # Trained again on the documents that were not held out, and on nothing else.
    run.data.paths = [origin for origin, out in zip(texts, held, strict=True) if not out]
    run.data.cache_dir = str(tmp_path / "second cache")
    run.data.validation_fraction = 0.0
    second = prepare(run)
    assert (second.tokenizer_folder / "tokenizer.json").read_bytes() == tokenizer
    assert second.num_documents == 20 - held.sum() == first.train.documents


def _hashes(texts: list[str]) -> np.ndarray:
    return np.array([document_hash(text) for text in texts], dtype=np.uint64)


def test_a_tokenizer_folder_or_file_is_taken_as_it_is(tmp_path: Path) -> None:
    words = ["<unk>", "the", "a", "cat", "</s>"]
    end = {"__type": "AddedToken", "content": "</s>", "special": True}
    folder = _word_tokenizer(tmp_path / "words", words, {"eos_token": end, "model_max_length": 99})
    (tmp_path / "text.txt").write_text("the cat dog", encoding="utf-8")
    for chosen in (folder, folder / "tokenizer.json"):
        run = config(tmp_path, source="text_files", paths=[str(tmp_path / "text.txt")], tokenizer=str(chosen))
        prepared = prepare(run)
        assert (prepared.vocab_size, prepared.eos_token_id) == (5, 4)
        assert TokenStore.open(prepared.folder).tokens.tolist() == [1, 3, 0, 4]
        loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
        assert loaded("the cat")["input_ids"] == [1, 3]
        assert loaded.eos_token_id == 4


def test_auto_takes_the_model_folders_tokenizer(tmp_path: Path) -> None:
    folder = _word_tokenizer(tmp_path / "model", ["<unk>", "the", "<eos>"])
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 10}))
    run = text_files(tmp_path)
    run.model.path, run.model.config = str(folder), {}
    assert prepare(run).vocab_size == 3
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2}))
    _refusal(run, ModelFolderError, "its vocabulary has 2 entries, but the tokenizer has 3")
    (folder / "tokenizer.json").write_text("{")
    _refusal(run, ModelFolderError, r"tokenizer\.json: is not a tokenizer")
    (folder / "tokenizer.json").unlink()
    _refusal(run, ModelFolderError, r"the folder has no tokenizer\.json; set data\.tokenizer")


def test_added_tokens_without_a_row_are_left_out_unless_a_text_needs_them(tmp_path: Path) -> None:
    """As the image token of Gemma 3's text models, and the padding token of fine-tunings. Oracle: Python's sets."""
    folder = _word_tokenizer(tmp_path / "model", ["<unk>", "the", "<eos>"], {"pad_token": "<pad>"})
    content = json.loads((folder / "tokenizer.json").read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": number, "content": text, "special": True, **plain} for number, text in ((3, "<pad>"), (4, "<turn>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    run = text_files(tmp_path)
    run.model.path, run.model.config = str(folder), {}
    prepared = prepare(run)
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert prepared.vocab_size == len(loaded) == 3 and loaded.pad_token is None
    check_tokenizer_size(run.model, run.data, run.objective)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}<turn>{% endfor %}")
    _refusal(run, ModelFolderError, r"the tokenizer has 5; .* or add model\.config\.vocab_size=5")
    run.model.config = {"vocab_size": 4}
    with pytest.raises(ConfigError, match=r"vocab_size=4: the tokenizer has 5 entries; use at least 5"):
        check_tokenizer_size(run.model, run.data, run.objective)
    run.model.config = {"vocab_size": 5}
    check_tokenizer_size(run.model, run.data, run.objective)
    assert prepare(run).vocab_size == 5


def test_a_tokenizer_that_cannot_work_is_refused(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    run.data.tokenizer = str(tmp_path / "absent")
    _refusal(run, ConfigError, r"data\.tokenizer=.*absent: no such file or folder")
    run.data.tokenizer = str(tmp_path)
    _refusal(run, ConfigError, r"data\.tokenizer=.*: the folder has no tokenizer\.json")
    run.data.tokenizer = str(_word_tokenizer(tmp_path / "endless", ["<unk>", "the"]))
    _refusal(run, ConfigError, "it names no eos_token; set eos_token in its tokenizer_config.json")
    run.data.tokenizer = str(_word_tokenizer(tmp_path / "wrong", ["<unk>", "</s>"], {"eos_token": "<end>"}))
    _refusal(run, ConfigError, "its eos_token <end> is not in its vocabulary")
    run.data.tokenizer = str(_word_tokenizer(tmp_path / "large", [*map(str, range(300)), "</s>"]))
    _refusal(run, ConfigError, r"model\.config\.vocab_size=300: the tokenizer has 301 entries; use at least 301")
    (tmp_path / "large" / "tokenizer.json").write_text("no json")
    _refusal(run, ConfigError, r"data\.tokenizer=.*tokenizer\.json is not a tokenizer")


def test_a_tokenizer_cannot_be_made_for_an_unknown_or_tiny_vocabulary(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    run.model.config = {}
    _refusal(run, ConfigError, r"model\.config\.vocab_size=null")
    run.model.config = {"vocab_size": 256}
    _refusal(run, ConfigError, r"model\.config\.vocab_size=256: .*; use at least 257")


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    words = ["</s>", *(f"w{number}" for number in range(70_000))]
    folder = _word_tokenizer(tmp_path / "words", words)
    (tmp_path / "text.txt").write_text("w69999 w1 w65535", encoding="utf-8")
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "text.txt")], tokenizer=str(folder))
    run.model.config = {"vocab_size": 70_001}
    assert TokenStore.open(prepare(run).folder).tokens.tolist() == [70_000, 2, 65_536, 0]


def test_synthetic_tokens_come_with_a_tokenizer_of_numbers(tmp_path: Path) -> None:
    run = config(tmp_path, source="synthetic")
    run.data.synthetic.num_documents, run.data.synthetic.sigma, run.data.synthetic.mean_length = 50, 0.0, 32
    prepared = prepare(run)
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert (len(loaded), loaded.eos_token_id, loaded("7 299")["input_ids"]) == (300, 0, [7, 299])
    store = TokenStore.open(prepared.folder)
    assert set(store.offsets.tolist()) == set(range(0, 51 * 32, 32))
    assert (store.tokens[31::32] == 0).all()
    assert (store.tokens == 0).sum() == 50
    assert store.tokens.max() < 300
    run.seed += 1
    assert TokenStore.open(prepare(run).folder).tokens.tolist() != store.tokens.tolist()


def test_a_chat_template_travels_with_the_tokenizer(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    run.data.chat_template = str(tmp_path / "chat.jinja")
    talk = [{"role": "user", "content": sentences(1, 3)}]
    expected = f"<|im_start|>user\n{talk[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    trained = prepare(run).tokenizer_folder
    folder = _word_tokenizer(tmp_path / "words", ["<unk>", "</s>"], {"chat_template": "another"})
    run.data.tokenizer = str(folder)
    for made in (trained, prepare(run).tokenizer_folder):
        loaded = AutoTokenizer.from_pretrained(made)
        assert loaded.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == expected
