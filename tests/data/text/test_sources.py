"""Sources: what they read, and what they refuse in one line that names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import sysconfig
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import read_hashed, write_hashed
from mgpu_pipe.data.data_source import all_names, check_sources, open_source
from mgpu_pipe.data.files import expand_paths
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.data.text.file_source import row_of
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError
from tests.data.support import config, text_files, write_jsonl
from tests.support.sampling import sampled


def _texts(run: RunConfig, tmp_path: Path) -> list[str]:
    return [document.text for document in open_source(run, tmp_path / "cache").documents()]


def _refusal(run: RunConfig, match: str, also_by_preflight: bool = True) -> None:
    """Both the preparation and the preflight refuse in one line without leaving tokens behind."""
    with pytest.raises(BadInputError, match=match) as refused:
        prepare(run)
    assert "\n" not in str(refused.value)
    assert ";" in str(refused.value) or ": " in str(refused.value).partition("=")[2], "there is no fix"
    assert refused.value.exit_code == 2
    stored = Path(run.data.cache_dir or "").glob("tokens/*/manifest.json")
    assert all(manifest.parent.name.startswith("answer-") for manifest in stored)
    if also_by_preflight:
        with pytest.raises(ConfigErrors, match=match):
            check_sources(run.model, run.data)
    else:
        check_sources(run.model, run.data)


def _record(text: str, kind: str = "conversion") -> bytes:
    content = text.encode()
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: text/plain\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def test_each_record_of_a_wet_file_is_a_document(tmp_path: Path) -> None:
    texts = ["First.\n\nWARC/1.0 is a format.", "Zweit\u00e9r.", ""]
    records = [_record("software: x", "warcinfo"), *map(_record, texts)]
    for name, content in (("a.warc.wet", b"".join(records)), ("a.warc.wet.gz", b"".join(map(gzip.compress, records)))):
        (tmp_path / name).write_bytes(content)
        run = config(tmp_path, source="text_files", paths=[str(tmp_path / name)])
        check_sources(run.model, run.data)
        assert _texts(run, tmp_path) == texts[:2]
        source = open_source(run, tmp_path / "opened")
        assert sum(document.size for document in source.documents()) == source.size, "the progress reaches its end"
    (tmp_path / "a.warc.wet").write_bytes(records[1].replace(b"Length: ", b"Length: " + b"9" * 5000))
    _refusal(
        config(tmp_path, source="text_files", paths=[str(tmp_path / "a.warc.wet")]), "record 1: has no head", False
    )
    (tmp_path / "a.warc.wet").write_bytes(b"".join(records)[:-60])
    _refusal(
        config(tmp_path, source="text_files", paths=[str(tmp_path / "a.warc.wet")]), "record 4: has no head", False
    )
    (tmp_path / "a.warc.wet").write_bytes(records[1][:-10])
    _refusal(
        config(tmp_path, source="text_files", paths=[str(tmp_path / "a.warc.wet")]), "record 1: ends before", False
    )
    (tmp_path / "a.warc.wet").write_bytes(b"Plain text.\n")
    _refusal(
        config(tmp_path, source="text_files", paths=[str(tmp_path / "a.warc.wet")]), "record 1: has no head", False
    )


def test_text_files_are_documents_in_sorted_order_each_once(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a/3.txt", "a/skip.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"{name}\r\n\u00e9".encode())
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "b" / "2.txt"), str(tmp_path / "**" / "*.txt")])
    check_sources(run.model, run.data)
    assert _texts(run, tmp_path) == [f"{name}\r\n\u00e9" for name in ("b/2.txt", "a/3.txt", "b/1.txt")]


def test_a_file_under_several_spellings_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "below/a.txt", "far/below/b.txt", "far/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "below")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    monkeypatch.chdir(tmp_path)
    spelled = ["./a.txt", "a.txt", str(tmp_path / "a.txt"), "below/../a.txt", "below//a.txt", "below/*.txt"]
    assert expand_paths(spelled, "data.paths") == [Path("a.txt"), Path("below/a.txt")]
    assert expand_paths(spelled[::-1], "data.paths") == [Path("below/a.txt"), Path("below/../a.txt")]
    linked = ["a.txt", "link.txt", "link/../a.txt", "link/../a.txt", "far/a.txt"]
    assert expand_paths(linked, "data.paths") == [Path(name) for name in (*linked[:3], "far/a.txt")]


def test_the_library_of_python_is_text_without_its_tests(tmp_path: Path) -> None:
    run = config(tmp_path, source="stdlib_text")
    check_sources(run.model, run.data)
    origins = [document.origin for document in open_source(run, tmp_path / "cache").documents()]
    root = sysconfig.get_path("stdlib")
    relative = [os.path.relpath(origin, root) for origin in origins]
    assert relative == sorted(relative)
    assert {"json/decoder.py", "argparse.py", "pydoc_data/topics.py"} <= set(relative)
    parts = {part for name in relative for part in Path(name).parts[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert len(relative) > 300


def test_jsonl_and_parquet_read_the_named_column(tmp_path: Path) -> None:
    texts = ["first", "", "third \u00fc\nline"]
    write_jsonl(tmp_path / "a.jsonl", [{"body": text, "id": 1} for text in texts])
    pyarrow.parquet.write_table(
        pyarrow.table({"id": [1, 2, 3], "body": texts}), tmp_path / "a.parquet", row_group_size=2
    )
    for source in ("jsonl", "parquet"):
        run = config(tmp_path, source=source, paths=[str(tmp_path / f"a.{source}")], text_column="body")
        check_sources(run.model, run.data)
        assert _texts(run, tmp_path) == texts
        opened = open_source(run, tmp_path / "cache")
        assert sum(document.size for document in opened.documents()) == opened.size


def test_a_column_may_be_a_field_of_an_object(tmp_path: Path) -> None:
    texts = ["first", "second"]
    rows = [{"meta": {"body": {"text": text}, "id": 1}, "id": 2} for text in texts]
    write_jsonl(tmp_path / "a.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for source in ("jsonl", "parquet"):
        run = config(tmp_path, source=source, paths=[str(tmp_path / f"a.{source}")], text_column="meta.body.text")
        check_sources(run.model, run.data)
        assert _texts(run, tmp_path) == texts
    write_jsonl(tmp_path / "b.jsonl", [{"meta.text": "whole name", "meta": {"text": "path"}}])
    run = config(tmp_path, source="jsonl", paths=[str(tmp_path / "b.jsonl")], text_column="meta.text")
    assert _texts(run, tmp_path) == ["whole name"]
    write_jsonl(tmp_path / "pairs.jsonl", [{"in": {"text": "a"}, "out": {"text": "b"}}])
    run = config(tmp_path, source="pairs_jsonl", paths=[str(tmp_path / "pairs.jsonl")])
    run.data.source_column, run.data.target_column = "in.text", "out.text"
    (pair,) = open_source(run, tmp_path / "cache").documents()
    check_sources(run.model, run.data)
    assert (pair.text, pair.target) == ("a", "b")
    line = '{"in": {"text": "a"}, "out": {"class": 3}}'
    assert row_of(replace(run.data, text_column="in.text", label_column="out.class"), line, "x:1").label == "3"
    for path in ("meta.body.words", "meta.text", "id.text"):
        run = config(tmp_path, source="jsonl", paths=[str(tmp_path / "a.jsonl")], text_column=path)
        _refusal(run, rf"a\.jsonl:1: has no column '{path}'; set data\.text_column to one")
    run = config(tmp_path, source="parquet", paths=[str(tmp_path / "a.parquet")], text_column="meta.body.words")
    _refusal(run, r"no column 'meta\.body\.words'; set data\.text_column to .*: meta\.body\.text")
    message = {"role": "assistant", "content": "hello"}
    write_jsonl(tmp_path / "chat.jsonl", [{"log": {"turns": [{"role": "user", "content": "hi"}, message]}}])
    chat = config(tmp_path, source="chat_jsonl", paths=[str(tmp_path / "chat.jsonl")], chat_template="plain")
    chat.data.messages_column = "log.turns"
    check_sources(chat.model, chat.data)
    assert prepare(replace(chat, data=replace(chat.data, validation_fraction=0.0))).train_tokens == 2


def _compressed(path: Path, parts: int = 1) -> bytes:
    """Of a text file, as ``parts`` streams one after the other, which is how such files are appended to."""
    text, codec = path.read_bytes(), {".gz": "gzip", ".zst": "zstd"}
    size = -(-len(text) // parts)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    if path.suffix == ".zip":
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("a/", b"")
            file.writestr("a/b.jsonl", text)
            file.writestr("__MACOSX/._b.jsonl", b"\0\1\2")
        return content.getvalue()
    pack = {".xz": lzma.compress, ".bz2": bz2.compress}.get(path.suffix)
    return b"".join(
        pack(piece) if pack else pyarrow.Codec(codec[path.suffix]).compress(piece, asbytes=True) for piece in pieces
    )


@pytest.mark.parametrize("ending", [".gz", ".zst", ".xz", ".bz2", ".zip"])
def test_compressed_text_reads_as_the_text(ending: str, tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", [{"text": f"number {index}"} for index in range(9000)])
    packed = tmp_path / f"a.jsonl{ending}"
    packed.write_bytes(plain.read_bytes())
    packed.write_bytes(_compressed(packed, 3))
    for source in ("jsonl", "text_files"):
        runs = [config(tmp_path, source=source, paths=[str(path)]) for path in (plain, packed)]
        check_sources(runs[1].model, runs[1].data)
        assert _texts(runs[1], tmp_path) == _texts(runs[0], tmp_path)
        opened = open_source(runs[1], tmp_path / "cache")
        size = sum(document.size for document in opened.documents())
        assert opened.size == packed.stat().st_size and (
            size == opened.size or (ending == ".zip" and 0 < size < opened.size)
        )
    renamed = tmp_path / "a.bin"
    renamed.write_bytes(packed.read_bytes())
    identities = [
        open_source(config(tmp_path, source="jsonl", paths=[str(p)]), tmp_path).identity for p in (packed, renamed)
    ]
    assert identities[0] != identities[1], "the same bytes, read as another text"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    sampled([(".gz",), (".zst",), (".xz",), (".bz2",), (".zip",)], lambda ending: ending not in (".xz", ".bz2")),
)
def test_a_broken_compressed_file_is_named_by_file_and_line(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    write_jsonl(path, [{"text": f"number {index} of {index * 7919 % 104729}"} for index in range(200_000)])
    whole = _compressed(path)
    run = config(tmp_path, source="jsonl", paths=[str(path)])
    path.write_bytes(whole[: len(whole) // 2])
    digits = 1 if ending == ".zip" else 4  # the list of a zip file's members stands at its end
    _refusal(run, rf"a\.jsonl\{ending}:\d{{{digits},}}: is not a whole \w+ file: ", also_by_preflight=ending == ".zip")
    path.write_bytes(b"this was never compressed")
    _refusal(run, rf"a\.jsonl\{ending}:1: is not a whole \w+ file: .*; replace the file")


def test_paths_that_match_nothing_are_refused_with_the_pattern(tmp_path: Path) -> None:
    for source in ("text_files", "jsonl", "parquet", "chat_jsonl"):
        run = config(tmp_path, source=source, paths=[str(tmp_path / "*.nothing")])
        _refusal(run, r"data\.paths=.*\*\.nothing: matches no file")
    _refusal(config(tmp_path, source="text_files"), r"data\.paths=\[\]: give at least one")
    _refusal(config(tmp_path, source="text_files", paths=[str(tmp_path)]), "is a folder")
    run = text_files(tmp_path)
    run.data.validation_paths = [str(tmp_path / "absent.txt")]
    with pytest.raises(ConfigError, match=r"data\.validation_paths=.*absent\.txt: matches no file"):
        prepare(run)
    with pytest.raises(ConfigErrors, match=r"data\.validation_paths"):
        check_sources(run.model, run.data)


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    for source in ("text_files", "jsonl", "parquet", "chat_jsonl"):
        (tmp_path / "empty").write_bytes(b"")
        _refusal(config(tmp_path, source=source, paths=[str(tmp_path / "empty")]), r"/empty: is empty")
    (tmp_path / "blank").write_bytes(b"\n\n")
    _refusal(config(tmp_path, source="jsonl", paths=[str(tmp_path / "blank")]), "blank lines only")


def test_a_file_that_is_not_utf8_is_refused_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"abc\nd\xe9f")
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "latin.txt")])
    _refusal(run, r"latin\.txt: is not UTF-8 \(byte 0xe9 at offset 5\)")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    run = config(tmp_path, source="jsonl", paths=[str(tmp_path / "latin.jsonl")])
    _refusal(run, r"latin\.jsonl.*: is not UTF-8 \(byte 0xe9 at offset 24\)")


def test_a_broken_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    run = config(tmp_path, source="jsonl", paths=[str(path)])
    for line, match in (
        ('{"text": "b"', r"broken\.jsonl:3: is not valid JSON: Expecting ',' delimiter \(character 14 of"),
        ('["b"]', r"broken\.jsonl:3: is a JSON list"),
        ('{"txt": "b", "id": 1}', r"broken\.jsonl:3: has no column 'text'; .* data\.text_column .*: txt, id"),
        ('{"text": 5}', r"broken\.jsonl:3: column 'text' holds int"),
        ('{"text": "\\ud800"}', r"broken\.jsonl:3: holds half of a surrogate pair \(U\+D800\)"),
    ):
        path.write_text('{"text": "a"}\n\n' + line + "\n", encoding="utf-8")
        _refusal(run, match, also_by_preflight=False)
    path.write_text('[{"text": "a"}\n', encoding="utf-8")
    _refusal(run, r"broken\.jsonl: is a JSON list without its end", also_by_preflight=False)
    for text, match in (
        ('{"txt": "a"}\n', r"broken\.jsonl:1: has no column 'text'"),
        ('[{"txt": "a"}]\n', r"broken\.jsonl: row 1: has no column 'text'"),
        ("text,label\na,b\n", r"broken\.jsonl:1: is no JSON; .* let the name of a table end in \.csv"),
        ('{"text": "a"\n', r"broken\.jsonl:1: is not valid JSON"),
    ):
        path.write_text(text, encoding="utf-8")
        _refusal(run, match)


def test_a_wrong_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    run = config(tmp_path, source="parquet", paths=[str(path)])
    for columns, match, by_preflight in (
        ({"words": ["a"]}, "has no column 'text'; set data.text_column to one that is there: words", True),
        ({"text": [1]}, "column 'text' holds int64", True),
        ({"text": ["a", None]}, "row 2: has no value", False),
        ({"text": pyarrow.array([], pyarrow.string())}, "holds no rows", True),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        _refusal(run, match, by_preflight)
    path.write_bytes(path.read_bytes()[:-20])
    _refusal(run, "is not a readable Parquet or Arrow file")
    path.write_bytes(b"text")
    _refusal(run, "is not a readable Parquet or Arrow file")


def test_numbers_out_of_range_and_unknown_sources_are_refused_together(tmp_path: Path) -> None:
    run = config(tmp_path, source="text_files", paths=["/absent/*.txt"], validation_fraction=1.0, seq_len=1)
    with pytest.raises(ConfigErrors) as refused:
        check_sources(run.model, run.data)
    assert [error.key for error in refused.value.errors if isinstance(error, ConfigError)] == [
        "data.validation_fraction",
        "data.seq_len",
        "data.paths",
    ]
    run = config(tmp_path, source="text_file")
    with pytest.raises(ConfigErrors, match=r"data\.source=text_file: no such source; did you mean text_files\?"):
        check_sources(run.model, run.data)
    run = config(tmp_path, source="stdlib_text", validation_paths=["x"])
    with pytest.raises(ConfigErrors, match=r"data\.validation_paths"):
        check_sources(run.model, run.data)
    run = config(tmp_path, source="synthetic")
    run.data.synthetic.num_documents = 0
    with pytest.raises(ConfigErrors, match=r"data\.synthetic\.num_documents=0"):
        check_sources(run.model, run.data)


def _edit_index(cache: Path, path: Path, **entries: object) -> None:
    (index,) = (cache / "fingerprints").iterdir()
    known = read_hashed(index)
    known[str(path)].update(entries)
    write_hashed(index, known)


LONG_AFTER_NS = time.time_ns() + 10**13


def test_a_changed_file_is_noticed_even_with_its_old_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before", encoding="utf-8")
    os.utime(path, ns=(10**18, 10**18))
    first = fingerprints([path], tmp_path / "cache")
    _edit_index(tmp_path / "cache", path, seen_ns=LONG_AFTER_NS)
    assert fingerprints([path], tmp_path / "cache") == first
    path.write_text("behind", encoding="utf-8")
    os.utime(path, ns=(10**18, 10**18))
    assert fingerprints([path], tmp_path / "cache") != first


def test_an_unchanged_file_is_read_again_only_if_it_was_hashed_right_after_its_change(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text", encoding="utf-8")
    first = fingerprints([path], tmp_path / "cache")
    # A marked hash shows whether the index is believed.
    _edit_index(tmp_path / "cache", path, blocks=["marked"])
    assert fingerprints([path], tmp_path / "cache") == first
    _edit_index(tmp_path / "cache", path, blocks=["marked"], seen_ns=LONG_AFTER_NS)
    assert fingerprints([path], tmp_path / "cache")[path].digest == "marked"


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that registers the source ``poems``."""
    site = tmp_path / "site"
    info = site / "poems-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poems\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mgpu_pipe.data]\npoems = poems_source:load\nwrong = poems_source:wrong\nnumbers = poems_source:numbers\n"
    )
    (site / "poems_source.py").write_text(
        "def load(config):\n"
        "    names = config.data.paths or ['rose']\n"
        "    return (f'{name} number {i}, ' * 5 for name in names for i in range(12))\n"
        "def wrong(config):\n"
        "    return [b'bytes']\n"
        "def numbers(config):\n"
        "    import numpy\n"
        "    return (numbers.change(i, numpy.arange(1, 9 + i)) for i in range(40))\n"
        "numbers.change = lambda i, tokens: tokens\n"
    )
    monkeypatch.syspath_prepend(str(site))
    return site


def test_a_plug_in_brings_documents(plug_in: Path, tmp_path: Path) -> None:
    run = config(tmp_path, source="poems", validation_paths=["tulip"])
    assert "poems" in all_names()
    check_sources(run.model, run.data)
    prepared = prepare(run)
    assert prepared.num_documents == 24
    assert prepared.validation is not None
    assert prepared.validation.documents == 12
    assert prepare(run) == prepared
    with pytest.raises(DataError, match=r"data\.source=wrong: document 0 is bytes, not str, nor"):
        prepare(config(tmp_path, source="wrong"))


def test_a_plug_in_brings_token_ids(plug_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import poems_source  # type: ignore[import-not-found]

    folder = prepare(config(tmp_path, source="poems")).tokenizer_folder
    run = config(tmp_path, source="numbers", tokenizer=str(folder), validation_fraction=0.0)
    prepared = prepare(run)
    store = TokenStore.open(prepared.folder)
    end = prepared.eos_token_id
    expected = [np.append(np.arange(1, 9 + number), end) for number in range(40)]
    assert np.array_equal(store.tokens, np.concatenate(expected))
    assert prepared.num_tokens == prepared.train_tokens + 40

    # The second half of each document is learned, and so is its end.
    monkeypatch.setattr(
        poems_source.numbers, "change", lambda _, tokens: (tokens, (np.arange(len(tokens)) >= 4).astype(int))
    )
    masked = prepare(run)
    assert masked.folder != prepared.folder
    assert masked.num_tokens == prepared.num_tokens
    assert masked.train_tokens == prepared.num_tokens - 40 * 4


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda number, tokens: tokens + 10_000 * (number == 3), "document 3 holds the token id 10001; data.tokenizer"),
        (lambda number, tokens: tokens - 2 * (number == 3), "document 3 holds the token id -1; data.tokenizer has ids"),
        (lambda number, tokens: tokens / 2, "document 0 is ndarray, not str, nor a NumPy array of token ids"),
        (lambda number, tokens: "text" if number == 5 else tokens, "document 5 is str, the first token ids;"),
        (lambda number, tokens: (tokens, tokens[1:]), "document 0: its loss mask must hold one 0 or 1 for each of"),
        (lambda number, tokens: (tokens, tokens), "document 0: its loss mask must hold one 0 or 1 for each of"),
    ],
)
def test_token_ids_that_cannot_be(
    change: object, line: str, plug_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import poems_source

    folder = prepare(config(tmp_path, source="poems")).tokenizer_folder
    monkeypatch.setattr(poems_source.numbers, "change", change)
    with pytest.raises(DataError, match=re.escape(f"data.source=numbers: {line}")):
        prepare(config(tmp_path, source="numbers", tokenizer=str(folder)))
    monkeypatch.setattr(poems_source.numbers, "change", lambda number, tokens: tokens)
    with pytest.raises(ConfigError, match="give the folder of the tokenizer that the ids come from"):
        prepare(config(tmp_path, source="numbers"))
