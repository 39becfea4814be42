"""Unusable texts and files next to whole ones: named and left out, or the run stops."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.data_source import check_sources
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.errors import BadInputError, ConfigErrors
from tests.data.support import config
from tests.data.test_too_long import row_of, trained_tokens, words
from tests.support.needs import need_speech
from tests.support.pictures import noise, packed, stored
from tests.support.sounds import tones, write_wav

SOURCES = ("jsonl", "chat_jsonl", "preferences_jsonl", "pairs_jsonl", "labelled_jsonl")
BAD_ROWS = (b"{broken", b'{"text": "caf\xe9"}', b'{"other": 1}', b"[1]")
"""Lines that no source can use."""


def prepared(run: RunConfig) -> Prepared:
    check_sources(run.model, run.data)
    return prepare(run)


def configured(tmp_path: Path, source: str, contents: dict[str, bytes], **data: Any) -> RunConfig:
    paths = []
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        paths.append(str(tmp_path / name))
    if source in ("chat_jsonl", "preferences_jsonl"):
        data["chat_template"] = "chatml"
    return config(tmp_path, source=source, paths=paths, validation_fraction=0.0, seq_len=64, **data)


def lines(source: str) -> list[bytes]:
    return [json.dumps(row_of(source, number, number + 3)).encode() for number in range(6)]


@pytest.mark.parametrize("source", SOURCES)
def test_rows_that_cannot_be_used_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    good = lines(source)
    mixed = b"\n".join([BAD_ROWS[0], *good[:3], *BAD_ROWS[1:], *good[3:]])
    contents = {"empty.jsonl": b"", "mixed.jsonl": mixed, "all_bad.jsonl": BAD_ROWS[0]}
    run = configured(tmp_path, source, contents, on_bad_sample="skip")
    with caplog.at_level(logging.WARNING):
        found = prepared(run)
    assert found.bad_samples == 6
    (line,) = (record.getMessage() for record in caplog.records if "left out" in record.getMessage())
    assert line.startswith("6 of the ")
    assert "empty.jsonl is empty; " in line and "mixed.jsonl:1 is " in line and line.endswith("; and 1 more")
    assert read_prepared(json.loads(json.dumps(found.as_dict()))) == found
    assert (6, "left out") in found.amounts()
    whole = configured(tmp_path, source, {"good.jsonl": b"\n".join(good)}, tokenizer=str(found.tokenizer_folder))
    alone = prepared(whole)
    assert alone.bad_samples == 0 and alone.train_samples == found.train_samples
    assert trained_tokens(alone, whole) == trained_tokens(found, run)
    # Also where the tokens are in the cache already.
    strict = replace(run, data=replace(run.data, on_bad_sample="stop"))
    for refuse in (lambda: check_sources(strict.model, strict.data), lambda: prepare(strict)):
        with pytest.raises(BadInputError, match=r"; data\.on_bad_sample=skip leaves it out$") as error:
            refuse()
        assert "empty.jsonl: is empty" in str(error.value)


@pytest.mark.parametrize("source", SOURCES)
def test_the_default_names_the_row_and_the_key(tmp_path: Path, source: str) -> None:
    run = configured(tmp_path, source, {"rows.jsonl": b"\n".join([*lines(source), BAD_ROWS[2]])})
    with pytest.raises(BadInputError, match=r"rows\.jsonl:7: .*; data\.on_bad_sample=skip leaves it out$"):
        prepared(run)


@pytest.mark.parametrize("source", SOURCES)
def test_a_corpus_without_a_usable_row_is_refused(tmp_path: Path, source: str) -> None:
    run = configured(tmp_path, source, {"rows.jsonl": b"\n".join(BAD_ROWS), "e.jsonl": b""}, on_bad_sample="skip")
    with pytest.raises(BadInputError, match=r"rows\.jsonl:1: is "):
        check_sources(run.model, run.data)
    with pytest.raises(BadInputError):
        prepare(run)


def test_text_files_that_are_empty_or_undecodable(tmp_path: Path) -> None:
    contents = {"a.txt": words(30).encode(), "b.txt": b"", "c.txt": b"caf\xe9", "d.txt": words(20, 1).encode()}
    contents |= {"e.gz": b"no gzip", "f.txt": b"\x7fELF\x02\x01\x01\xff" + bytes(60)}
    run = configured(tmp_path, "text_files", contents, on_bad_sample="skip")
    found = prepared(run)
    assert (found.bad_samples, found.amounts()[0]) == (4, (2, "documents"))
    for name in ("b.txt", "c.txt", "e.gz", "f.txt"):
        strict = configured(tmp_path, "text_files", {"a.txt": contents["a.txt"], name: contents[name]})
        with pytest.raises(BadInputError, match=rf"{name}:.*; data\.on_bad_sample=skip leaves it out$"):
            prepared(strict)


def test_rows_of_tables_after_a_broken_one(tmp_path: Path) -> None:
    table = b'text,n\nfirst words,1\ncaf\xe9,2\n"a" b,3\nmore words,4,5\nlast words,6\n'
    run = configured(tmp_path, "jsonl", {"rows.csv": table}, on_bad_sample="skip")
    found = prepared(run)
    assert (found.bad_samples, found.amounts()[0]) == (3, (2, "documents"))


def test_texts_of_parquet_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    wrong = pyarrow.array([b"caf\xe9 au lait"], pyarrow.binary()).view(pyarrow.string())
    column = pyarrow.chunked_array([pyarrow.array(["one text", None, "two texts"]), wrong])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "rows.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + bytes(40))
    paths = [str(tmp_path / name) for name in ("rows.parquet", "broken.parquet")]
    for source in ("parquet", "jsonl"):
        run = config(tmp_path, source=source, paths=paths, on_bad_sample="skip", validation_fraction=0.0)
        found = prepared(run)
        assert (found.bad_samples, found.amounts()[0]) == (3, (2, "documents"))


def test_check_refuses_parquet_files_that_preparation_would(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + bytes(100) + b"\x10\0\0\0PAR1")
    parquet.write_table(pyarrow.table({"text": ["a"], "id": [1]}), tmp_path / "good.parquet")
    cases = {"cut.parquet": "is not a readable Parquet or Arrow file", "good.parquet": "has no column 'words'"}
    for name, reason in cases.items():
        run = config(tmp_path, source="parquet", paths=[str(tmp_path / name)], text_column="words")
        with pytest.raises(ConfigErrors, match=reason):
            check_sources(run.model, run.data)
    number = config(tmp_path, source="parquet", paths=[str(tmp_path / "good.parquet")], text_column="id")
    with pytest.raises(ConfigErrors, match="holds int64, not strings"):
        check_sources(number.model, number.data)
    paths = [str(tmp_path / name) for name in cases]
    tables = config(tmp_path, source="parquet", paths=paths, on_bad_sample="skip")
    check_sources(tables.model, tables.data)


@pytest.mark.parametrize("workers", [1, 2])
def test_conversations_that_the_template_refuses(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mgpu_pipe.data.text import encode_source

    monkeypatch.setattr(encode_source, "_POOL_FROM_CHARACTERS", 100)
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}[end]{% endfor %}"
    )
    rows = [json.loads(line) for line in lines("chat_jsonl")]
    rows[0]["messages"][0]["content"] = rows[4]["messages"][0]["content"] = "no"
    content = b"\n".join(json.dumps(row).encode() for row in rows)
    run = configured(tmp_path, "chat_jsonl", {"rows.jsonl": content}, on_bad_sample="skip", tokenize_workers=workers)
    run.data.chat_template = str(template)
    found = prepared(run)
    assert (found.bad_samples, found.amounts()[0]) == (2, (4, "documents"))


def test_documents_of_a_plug_in(tmp_path: Path) -> None:
    from mgpu_pipe.data.data_source import plug_in_source

    def given() -> list[object]:
        return [3, "a text", "half of a pair: \ud800", "another"]

    source = plug_in_source(config(tmp_path, source="mine", on_bad_sample="skip").data, given)
    assert [document.fault is None for document in source.documents()] == [False, True, False, True]
    with pytest.raises(BadInputError, match=r"document 0 is int.*; data\.on_bad_sample=skip leaves it out$"):
        plug_in_source(config(tmp_path, source="mine").data, given)


def test_what_is_left_out_of_a_mixture_is_added_up(tmp_path: Path) -> None:
    from mgpu_pipe.data.sources.mixture import MixtureConfig, MixtureSource

    run = configured(tmp_path, "jsonl", {"rows.jsonl": b"\n".join([*lines("jsonl"), *BAD_ROWS]), "t.txt": b"caf\xe9"})
    (tmp_path / "whole.txt").write_text(words(40))
    texts = MixtureSource(source="text_files", paths=[str(tmp_path / "t.txt"), str(tmp_path / "whole.txt")])
    mixed = MixtureConfig(**{**vars(run.data), "source": "mixture", "paths": [], "on_bad_sample": "skip"})
    mixed.sources = {"a": MixtureSource(source="jsonl", paths=run.data.paths[:1]), "b": texts}
    found = prepare(replace(run, data=mixed))
    assert found.bad_samples == 5 and (5, "left out") in found.amounts()
    samples = found.open(replace(run, data=mixed), "train")
    assert len(samples) == found.train_samples and samples.valid_units(np.arange(2), np.arange(2)) > 0


@pytest.mark.parametrize(
    ("head", "form"), [(b"PAR1", "a Parquet file"), (b"7z", "a binary file"), (b"t\0e\0x\0t\0s\0.\0.\0.\0", "UTF-16")]
)
def test_other_formats_that_are_valid_utf8(tmp_path: Path, head: bytes, form: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(head + bytes(40) + b"text " * 20)
    run = config(tmp_path, source="text_files", paths=[str(path)])
    for refusing in (lambda: check_sources(run.model, run.data), lambda: prepare(run)):
        with pytest.raises(BadInputError, match=rf"a\.txt: is .*{form}, not text"):
            refusing()


TOWER = "model.config.vision_config"
CLIP = ("model=clip_tiny", f"{TOWER}.image_size=16", f"{TOWER}.patch_size=4", f"{TOWER}.num_channels=3")
GIVEN: dict[str, tuple[str, ...]] = {
    "image_list": ("objective=image_classification", "model=vit_tiny", "model.config.num_channels=3"),
    "captions": ("objective=contrastive", *CLIP, "data.seq_len=12"),
    "audio_list": ("objective=ctc", "model=wav2vec2_tiny"),
    "picture_chats": (
        *("objective=vision_language", "model=llava_tiny", f"{TOWER}.num_channels=3"),
        *("data.chat_template=chatml", "data.seq_len=64"),
    ),
    "image_tar": ("objective=image_classification", "model=vit_tiny", "model.config.num_channels=3"),
}
SPOILED = {"empty": b"", "binary": bytes(range(256)) * 8, "blank": b"\n\n"}


def write_whole(source: str, folder: Path) -> str:
    """Writes four samples as a file; returns the suffix of its kind."""
    for number in range(4):
        (folder / f"{number}.png").write_bytes(stored(noise(number)))
    if source == "image_tar":
        members = [
            (f"{n}.{end}", raw)
            for n in range(4)
            for end, raw in (("png", stored(noise(n))), ("cls", b"ab"[n % 2 :][:1]))
        ]
        packed(folder / "whole.tar", members)
        return "tar"
    rows: list[dict[str, Any]]
    if source == "audio_list":
        need_speech()
        for number in range(4):
            write_wav(folder / f"{number}.wav", tones("ab", number))
        rows = [{"path": f"{n}.wav", "text": "ab"} for n in range(4)]
    elif source == "picture_chats":
        said = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "x"}]
        rows = [{"messages": said, "images": [f"{n}.png"]} for n in range(4)]
    else:
        rows = [{"image": f"{n}.png", "label": "ab"[n % 2], "caption": f"number {n}"} for n in range(4)]
    (folder / "whole.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "jsonl"


@pytest.mark.parametrize("source", GIVEN)
def test_unreadable_files_beside_a_whole_one_are_left_out(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    suffix = write_whole(source, tmp_path)
    for name, raw in SPOILED.items():
        (tmp_path / f"{name}.{suffix}").write_bytes(raw)
    given = (*GIVEN[source], f"data={source}", f"data.paths=['{tmp_path}/*.{suffix}']", "data.validation_fraction=0")
    config, stopped = (
        compose([*given, f"data.cache_dir={tmp_path / 'cache'}", f"data.on_bad_sample={rule}"])[0]
        for rule in ("skip", "stop")
    )
    preflight(config)
    found: Any = prepare(config)
    assert found.train_samples == 4 and found.bad_samples >= len(SPOILED)
    assert all(f"{tmp_path}/{name}.{suffix}" in caplog.text for name in SPOILED)
    with pytest.raises(BadInputError, match=rf"binary\.{suffix}"):
        preflight(stopped)
    (tmp_path / f"whole.{suffix}").unlink()
    with pytest.raises(BadInputError):
        preflight(config)
        prepare(config)
