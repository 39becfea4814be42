"""A long text file is held as UTF-8: it reads as a str does, gives the same tokens, and takes no more memory."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mgpu_pipe.data import files
from mgpu_pipe.data.sources import text_files as source
from mgpu_pipe.data.text import tokenizer_train
from mgpu_pipe.data.text.documents import LongText, UndecodableError
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.token_store import TokenStore
from tests.data.support import config, sentences

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
    monkeypatch.setattr(files, "_PART", 999)
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
