"""Tokenizers to GGUF and back. Oracles: the tokenizers library on the first folder, and llama.cpp where npm has it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors, trainers
from transformers import PreTrainedTokenizerFast

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.check_gguf import LlamaLibrary
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.gguf_tokenizer import describe_tokenizer, write_tokenizer_folder
from mgpu_pipe.inference.gguf.model_metadata import metadata_of
from mgpu_pipe.inference.gguf.tokenizer_kinds import PRE_TOKENIZERS, merges_of
from mgpu_pipe.inference.gguf.write import lay_out, write_gguf
from mgpu_pipe.inference.open import read_from
from mgpu_pipe.models.build import build_meta, materialise
from tests.inference.support import WORDS, write_tokenizer
from tests.models.tiny import tiny_model
from tests.support.libllama import libllama

ROWS = 512
TEXTS = [
    *("the quick brown fox jumps", "  the  lazy dog\n\n\tsleeps near 2024 an old oak.", "naïve café — 日本 🙂"),
    *("IT'S don't 3.14% x=[1,22,333]", "the", " "),
]
SPACE = "\u2581"
MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def write_pieces(folder: Path, prefix: bool) -> Path:
    """A tokenizer as Llama 2's: pairs of characters, bytes for the rest."""
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(
        [SPACE.join(["", *WORDS])] * 3, trainers.BpeTrainer(vocab_size=160, show_progress=False, max_token_length=8)
    )
    content = json.loads(trained.to_str())
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{number:02X}>" for number in range(256)), *content["model"]["vocab"]]
    content["model"] |= {
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    steps = [{"type": "Prepend", "prepend": SPACE}, MARKS] if prefix else [MARKS]
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    content["added_tokens"] = [
        {
            "id": number,
            "content": text,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            "special": True,
        }
        for number, text in enumerate(special)
    ]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(str(folder))
    return folder


def write_words(folder: Path, name: str) -> Path:
    """A byte-level tokenizer that cuts texts as ``name`` says."""
    write_tokenizer(folder)
    file, known = folder / "tokenizer.json", PRE_TOKENIZERS[name]
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": known.steps()}
    content["model"]["ignore_merges"] = known.ignores_merges
    file.write_text(json.dumps(content))
    return folder


def put_around(folder: Path, first: str = "", last: str = "") -> Path:
    """``folder`` with a token before and one after every text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(text, tokenizer.token_to_id(text)) for text in {first, last} - {""}]
    single = " ".join([first, "$A", last]).strip()
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def same_tokens(folder: Path, scratch: Path, left_out: tuple[str, ...] = ()) -> dict[str, object]:
    """Write a file with the tokenizer, read it by all readers, compare ids; returns its metadata.

    Args:
        left_out: ends of keys that the file goes without.
    """
    model = materialise(build_meta(tiny_model("llama", vocab_size=ROWS)), 1, "cpu")
    tokens = {key: value for key, value in describe_tokenizer(folder, ROWS).items() if not key.endswith(left_out)}
    file = scratch / "model.gguf"
    write_gguf(lay_out(model), read_from(model), file, "fp32", {**metadata_of(model.config), **tokens}, {})
    again = scratch / "again"
    again.mkdir()
    write_tokenizer_folder(GgufFile(file), again)
    expected, found = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (folder, again))
    library = libllama()
    theirs = LlamaLibrary(library, file) if library is not None else None
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert theirs is None or list(theirs.tokenize(text)) == ids, text
        assert found.decode(ids) == expected.decode(ids) or tokens["tokenizer.ggml.model"] == "llama"
    return tokens


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_with_scores_cut_texts_as_pairs_in_order(prefix: bool, tmp_path: Path) -> None:
    tokens = same_tokens(write_pieces(tmp_path / "tokenizer", prefix), tmp_path)
    assert tokens["tokenizer.ggml.add_space_prefix"] is prefix
    kinds = tokens["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list) and kinds[:4] == [3, 3, 3, 6]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_is_named_and_read_back(name: str, tmp_path: Path) -> None:
    assert same_tokens(write_words(tmp_path / "tokenizer", name), tmp_path)["tokenizer.ggml.pre"] == name


def test_pieces_begin_with_the_first_token_where_the_file_says_nothing(tmp_path: Path) -> None:
    folder = put_around(write_pieces(tmp_path / "tokenizer", True), "<s>")
    same_tokens(folder, tmp_path, left_out=("add_bos_token", "add_eos_token", "_token_id"))
    named = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert [named[f"{name}_token"] for name in ("bos", "eos", "unk")] == ["<s>", "</s>", "<unk>"]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_words_begin_with_the_first_token_where_llama_cpp_says_so(name: str, tmp_path: Path) -> None:
    folder = write_words(tmp_path / "tokenizer", name)
    if name in ("llama-bpe", "tekken"):
        put_around(folder, "<|endoftext|>")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|endoftext|>"}))
    same_tokens(folder, tmp_path, left_out=("add_bos_token", "add_eos_token"))


@pytest.mark.parametrize(("first", "last"), [("", "</s>"), ("<s>", "</s>"), ("<s>", "")])
def test_tokens_around_a_text_are_kept(first: str, last: str, tmp_path: Path) -> None:
    tokens = same_tokens(put_around(write_pieces(tmp_path / "tokenizer", True), first, last), tmp_path)
    assert [tokens[f"tokenizer.ggml.add_{end}_token"] for end in ("bos", "eos")] == [bool(first), bool(last)]


@pytest.mark.parametrize(("lengths", "problem"), [([1025], "a piece of 1025"), (range(1, 1025), "pairs take more")])
def test_pieces_with_more_cuts_than_any_tokenizer_s_are_refused(lengths: Sequence[int], problem: str) -> None:
    texts = ["a" * length for length in lengths]
    with pytest.raises(ValueError, match=problem):
        merges_of(texts, [0.0] * len(texts), [1] * len(texts))


def test_cuts_of_long_pieces_take_no_memory_unless_they_are_pieces() -> None:
    texts = [f"{number:05d}" + "b" * 1000 for number in range(100)]
    tracemalloc.start()
    assert merges_of(texts, [0.0] * len(texts), [1] * len(texts)) == []
    assert tracemalloc.get_traced_memory()[1] < 1 << 18
    tracemalloc.stop()


def test_pieces_that_mark_spaces_otherwise_are_refused(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "tokenizer", True)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "NFKC"}
    file.write_text(json.dumps(content))
    with pytest.raises(BadInputError, match=r"marks spaces as llama\.cpp cannot"):
        describe_tokenizer(folder, ROWS)
