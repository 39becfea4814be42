"""Long texts, kept as UTF-8 and encoded in pieces: the tokens of the whole text, for tokenizers of every kind."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from mgpu_pipe.data import files
from mgpu_pipe.data.sources import text_files as source
from mgpu_pipe.data.text import document_encoder, encode_source, tokenizer_train
from mgpu_pipe.data.text.cut_texts import PieceSize
from mgpu_pipe.data.text.document_encoder import EncoderSpec
from mgpu_pipe.data.text.documents import Document, LongText, UndecodableError
from mgpu_pipe.data.text.encode_source import encode_all
from mgpu_pipe.data.text.heldout_split import document_hash
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.token_store import TokenStore
from tests.data.support import config, sentences
from tests.data.text.tokenizer_kinds import END_OF_TEXT, KINDS, write_kind
from tests.data.text.written import CONTENTS, EOS

CHARACTERS = "a é文𝄞\r\n\ufeff"


def _parts(raw: bytes, draw: random.Random) -> list[bytes]:
    borders = sorted(draw.choices(range(len(raw) + 1), k=draw.randint(0, 9)))
    return [raw[start:end] for start, end in zip([0, *borders], [*borders, len(raw)], strict=True)]


def test_slices_are_those_of_a_str() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        content = "".join(draw.choices(CHARACTERS, k=draw.randint(0, 30)))
        text, expected = LongText(_parts(content.encode(), draw)), content.removeprefix("\ufeff")
        assert (str(text), len(text)) == (expected, len(expected))
        start, stop = draw.randint(0, 35), draw.randint(0, 35)
        assert text[start:stop] == expected[start:stop]
        assert text[start:] == expected[start:]


def test_the_first_bad_byte_is_found_wherever_parts_end() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        raw = "".join(draw.choices(CHARACTERS, k=draw.randint(1, 20))).encode()
        at = draw.randint(0, len(raw))
        raw = raw[:at] + bytes(draw.choices(range(128, 256), k=draw.randint(1, 6))) + raw[at:]
        try:
            raw.decode()
            continue
        except UnicodeDecodeError as error:
            expected = error.start
        with pytest.raises(UndecodableError) as caught:
            LongText(_parts(raw, draw))
        assert caught.value.offset + caught.value.error.start == expected


def test_a_long_file_has_the_tokens_and_tokenizer_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_SHORT", 1000)
    monkeypatch.setattr(files, "_BYTES_A_READ", 999)
    text = "".join(f"{sentences(seed, 500)}é𝄞\r\n" for seed in range(200))
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    prepared = [
        prepare(config(tmp_path, source=name, paths=[str(tmp_path / file)], validation_fraction=0.0))
        for name, file in (("text_files", "text.txt"), ("jsonl", "text.jsonl"))
    ]
    mine, other = (TokenStore.open(data.folder) for data in prepared)
    assert np.array_equal(mine.tokens, other.tokens)
    assert np.array_equal(mine.hashes, other.hashes)
    mine_file, other_file = (Path(data.tokenizer_folder) / "tokenizer.json" for data in prepared)
    assert mine_file.read_bytes() == other_file.read_bytes()


def test_a_bad_byte_far_into_a_long_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("é".encode() * 400_001 + b"\xe9 rest")
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "text.txt")])
    with pytest.raises(files.DataError, match=r"text\.txt: is not UTF-8 \(byte 0xe9 at offset 800002\); convert it"):
        prepare(run)


def test_words_end_where_one_search_of_the_text_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_train, "_SEARCHED_CHARACTERS", 3)
    draw = random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choices("ab \n\t", k=draw.randint(0, 30)))
        start = draw.randint(0, 32)
        found = re.compile(r"\S(?=[ \n])").search(text, start)
        assert tokenizer_train._word_end(text, start) == (found.end() if found else len(text))


def test_one_emoji_costs_no_more_than_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("🚨" + sentences(0, 100) * 50_000, encoding="utf-8")
    size = path.stat().st_size
    run = config(tmp_path, source="text_files", paths=[str(path)])
    opened = source.FORMAT.open(run.data, tmp_path, lambda *_: None, "data.paths")
    tracemalloc.start()
    (document,) = opened.documents()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert document.length == size - 3
    assert peak < 1.5 * size


TINY = PieceSize(piece=160, overlap=80, agreement=16)
PARTS = [
    *CONTENTS,
    *("house ", "the house", " Hello there", "user: ", ",", "...", "\n", "\n\n", "  ", "    ", "\t", " \n", "\r\n"),
    *(
        *("1", "12345", "3.14", "'ll", "don't", "aaaaaaaaaaaa", "é", "e\u0301", "\u00a0", "日本語", "한국", "🏳️‍🌈"),
        *("🇩🇪🇫🇷", "ﬁ", "İ"),
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
