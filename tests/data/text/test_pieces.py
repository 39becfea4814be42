"""Long texts in pieces: the tokens of the whole text, for tokenizers of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from mgpu_pipe.data.text import document_encoder, encode_source, tokenizer_train
from mgpu_pipe.data.text.cut_texts import PieceSize
from mgpu_pipe.data.text.document_encoder import EncoderSpec
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.encode_source import encode_all
from mgpu_pipe.data.text.heldout_split import document_hash
from tests.data.text.tokenizer_kinds import END_OF_TEXT, KINDS, write_kind
from tests.data.text.written import CONTENTS, EOS

TINY = PieceSize(piece=160, overlap=80, agreement=16)
PARTS = [
    *CONTENTS,
    *("house ", "the house", " Hello there", "user: ", ",", "...", "\n", "\n\n", "  ", "    ", "\t", " \n", "\r\n"),
    *(
        "1",
        "12345",
        "3.14",
        "'ll",
        "don't",
        "aaaaaaaaaaaa",
        "é",
        "e\u0301",
        "\u00a0",
        "日本語",
        "한국",
        "🏳️‍🌈",
        "🇩🇪🇫🇷",
        "ﬁ",
        "İ",
    ),
    *(EOS, "<s>", "<|im_end|>", "\x00", "x" * 130),
]


def _trained(model: str, folder: Path) -> Path:
    """Kinds that are not in tokenizer_kinds."""
    special = ["<unk>", EOS]
    if model == "whole text":  # Llama: the whole text is one word
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False, max_token_length=8)
        tokenizer.train_from_iterator([text for text in CONTENTS for _ in range(3)], trainer)
    elif model == "unigram, always":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        tokenizer.train_from_iterator(CONTENTS * 20, trainer)
    elif model == "unigram, whole text":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        tokenizer.train_from_iterator(CONTENTS * 20, trainer)
    elif model == "whitespace":
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=special)
        tokenizer.train_from_iterator(CONTENTS, trainer)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.FixedLength(7), pre_tokenizers.ByteLevel(add_prefix_space=True)]
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(CONTENTS, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    number = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{EOS} $A {EOS}", special_tokens=[(EOS, number)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


OTHERS = ("whole text", "unigram, always", "unigram, whole text", "whitespace", "fixed length")


def _texts(seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(40):
        some = draw.sample([*PARTS, "<mask>"], draw.randint(1, 8))
        yield "".join(draw.choice(some) for _ in range(draw.randint(20, 200)))


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_pieces_have_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    (write_kind if kind in KINDS else _trained)(kind, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    eos = tokenizer.token_to_id(END_OF_TEXT.get(kind, EOS))
    spec = EncoderSpec(str(tmp_path / "tokenizer.json"), eos, tokenizer.get_vocab_size())
    documents = [Document(text, "here", len(text.encode())) for seed in range(2) for text in _texts(seed)]
    whole = list(encode_all(spec, documents, 1))
    lengths: list[int] = []
    encode_piece = document_encoder.encode_piece

    def noted(tokenizer, piece, size):
        lengths.append(len(piece.text))
        return encode_piece(tokenizer, piece, size)

    for module in (document_encoder, encode_source):
        monkeypatch.setattr(module, "PIECES", TINY)
    monkeypatch.setattr(document_encoder, "encode_piece", noted)
    parts = list(encode_all(spec, documents, 1))
    for name in ("lengths", "hashes", "tokens"):
        one, two = (np.concatenate([getattr(batch, name) for batch in some]) for some in (whole, parts))
        assert one.tolist() == two.tolist(), name
    assert sum(batch.size for batch in parts) == sum(document.size for document in documents)
    assert lengths, "the documents are encoded in pieces"
    if "whole text" not in kind and kind != "fixed length":
        assert sum(lengths) < 3 * sum(len(document.text) for document in documents)


def test_a_long_texts_hash_is_that_of_the_text():
    text = "é𝄞a" * 700_000
    assert document_hash(text) == document_hash(text.encode())


def test_a_tokenizer_learns_the_same_from_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = []
    for characters in (1 << 30, 50):
        monkeypatch.setattr(tokenizer_train, "_PIECE_CHARACTERS", characters)
        (folder := tmp_path / str(characters)).mkdir()
        pairs = [(text, text) for text in _texts(1)]
        texts = tokenizer_train.training_texts(pairs, pairs, 0.0, lambda *_: None)
        tokenizer_train.train_bpe(texts, 600, folder)
        files.append((folder / "tokenizer.json").read_bytes())
    assert files[0] == files[1]
