"""Preparation: cached, rebuilt when stale or damaged, done once by many processes, and free of torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from mgpu_pipe.data import cache as cache_module
from mgpu_pipe.data import fingerprint
from mgpu_pipe.data.cache import hash_blocks
from mgpu_pipe.data.data_source import open_source
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text import encode_source
from mgpu_pipe.data.text import tokenizer as tokenizer_module
from mgpu_pipe.data.text.encode_source import encode_all
from mgpu_pipe.data.text.packed_dataset import PackedDataset
from mgpu_pipe.data.text.prepare_text import PreparedData, prepare
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import encoder_spec, resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_folder import token_bytes
from mgpu_pipe.errors import ConfigError, DataError
from tests.data.support import config, sentences, text_files, write_jsonl
from tests.support.sampling import one_in

ROOT = Path(__file__).parents[3]


def _stages(run: object) -> tuple[PreparedData, set[str]]:
    stages: list[tuple[str, int, int]] = []
    prepared = prepare(run, lambda *told: stages.append(told))  # type: ignore[arg-type]
    for _, done, total in stages:
        assert 0 <= done <= total
    return prepared, {stage for stage, *_ in stages} - {"hash"}


def test_the_second_preparation_finds_everything(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    first, stages = _stages(run)
    assert stages == {"train tokenizer", "tokenise", "pack"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    second, stages = _stages(run)
    assert (second, stages) == (first, set())
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    unchanged = {path for path in before if "fingerprints" not in path.parts}
    assert {path: before[path] for path in unchanged} == {path: after[path] for path in unchanged}


def test_prepared_data_survives_json(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    for fraction in (0.05, 0.0):
        run.data.validation_fraction = fraction
        prepared = prepare(run)
        assert PreparedData.from_dict(json.loads(json.dumps(prepared.as_dict()))) == prepared


def test_the_context_of_a_token_is_that_of_its_piece_of_a_document(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    prepared = prepare(run)
    batch = prepared.open(run, "train").batch(np.arange(prepared.train_samples))  # type: ignore[call-arg]
    seen = []
    for positions, labels in zip(batch["position_ids"], batch["labels"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        lengths = [stop - start for start, stop in pairwise(starts) if bool((labels[start:stop] != IGNORE_INDEX).any())]
        seen += lengths
    assert prepared.context(run.data) == pytest.approx(sum(n * n for n in seen) / sum(seen), rel=1e-2)
    assert Prepared.context(prepared, run.data) == run.data.seq_len


def test_what_changes_the_data_changes_its_digest_and_nothing_else_does(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    first = prepare(run).digest
    for same in (
        {"cache_dir": str(tmp_path / "other cache")},
        {"global_batch_size": 4},
        {"micro_batch_size": 2},
        {"validation_max_samples": 1},
        {"num_workers": 1},
    ):
        assert prepare(replace(run, data=replace(run.data, **same))).digest == first, same
    (tmp_path / "corpus").rename(tmp_path / "moved")
    run.data.paths = [str(tmp_path / "moved" / "**" / "*.txt")]
    assert prepare(run).digest == first
    assert prepare(replace(run, seed=5)).digest == first
    digests = [first]
    for other in ({"seq_len": 16}, {"packing": "none"}, {"validation_fraction": 0.2}):
        digests.append(prepare(replace(run, data=replace(run.data, **other))).digest)
    (tmp_path / "moved" / "part0" / "000.txt").write_text("something else", encoding="utf-8")
    digests.append(prepare(run).digest)
    assert len(set(digests)) == len(digests)


def test_stale_tokens_are_not_taken_after_a_file_changed(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    first = prepare(run)
    path = tmp_path / "corpus" / "part1" / "019.txt"
    path.write_text(path.read_text().replace("the", "tha"), encoding="utf-8")
    second, stages = _stages(run)
    assert second.folder != first.folder
    assert "tokenise" in stages


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["short", "missing"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    run = text_files(tmp_path)
    first = prepare(run)
    assert first.validation is not None
    tokens = TokenStore.open(first.folder).tokens.tolist()
    packs = np.load(first.train.packs / "start.npy").tolist()
    for folder in (first.folder, first.train.packs):
        path = folder / (name if (folder / name).exists() else "start.npy")
        if damage == "missing":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size - 1)
    second, stages = _stages(run)
    assert (second, stages) == (first, {"tokenise", "pack"})
    assert TokenStore.open(second.folder).tokens.tolist() == tokens
    assert np.load(second.train.packs / "start.npy").tolist() == packs


def test_a_broken_tokenizer_in_the_cache_is_made_again(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    first = prepare(run)
    content = (first.tokenizer_folder / "tokenizer.json").read_bytes()
    (first.tokenizer_folder / "tokenizer.json").write_bytes(content[:100])
    assert prepare(run) == first
    assert (first.tokenizer_folder / "tokenizer.json").read_bytes() == content


def test_a_failed_preparation_leaves_nothing_that_is_taken_for_data(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    run.data.tokenizer = str(prepare(run).tokenizer_folder)
    bad = tmp_path / "corpus" / "part1" / "zzz.txt"
    bad.write_bytes(b"fine at first\xff")
    run.data.cache_dir = str(tmp_path / "other cache")
    with pytest.raises(DataError, match="not UTF-8"):
        prepare(run)
    assert not [path for path in (tmp_path / "other cache" / "tokens").iterdir() if path.suffix != ".lock"]


RACE = """
import json, sys
from pathlib import Path
from mgpu_pipe.data.text.prepare_text import prepare
from tests.data.support import config
run = config(Path(sys.argv[1]), source="text_files", paths=[sys.argv[1] + "/corpus/**/*.txt"])
print("ready", flush=True)
sys.stdin.readline()
finished = []
prepared = prepare(run, lambda stage, done, total: done == total and finished.append(stage))
assert not {"torch", "transformers", "pytorch_lightning"} & set(sys.modules), "torch was imported"
print(json.dumps({"prepared": prepared.as_dict(), "finished": finished}))
"""


def test_processes_that_prepare_at_once_do_the_work_once_and_without_torch(tmp_path: Path) -> None:
    run = text_files(tmp_path, 40)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    found = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        found.append(json.loads(out))
    finished = Counter(stage for one in found for stage in one["finished"] if stage != "hash")
    # Two packings: the training and the held-out samples.
    assert finished == {"train tokenizer": 1, "tokenise": 1, "pack": 2}
    assert all(one["prepared"] == found[0]["prepared"] for one in found)
    assert PreparedData.from_dict(found[0]["prepared"]) == prepare(run)


def _long_corpus(tmp_path: Path) -> None:
    """Sixteen files, each about as long as a batch of the encoder."""
    (tmp_path / "corpus").mkdir()
    for number in range(16):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(sentences(number, 40_000), encoding="utf-8")


@pytest.mark.slow
def test_processes_and_one_process_tokenise_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_source, "_POOL_FROM_CHARACTERS", 1 << 19)
    _long_corpus(tmp_path)
    run = config(tmp_path, source="text_files", paths=[str(tmp_path / "corpus" / "*.txt")], validation_fraction=0.0)
    source = open_source(run, tmp_path / "cache")
    spec = encoder_spec(
        run.data,
        resolve_tokenizer(run.model, run.data, run.objective, [(run.data, source)], tmp_path / "cache"),
        source,
    )
    one, two = (list(encode_all(spec, source.documents(), workers)) for workers in (1, 2))
    for name in ("tokens", "lengths", "hashes"):
        joined = [np.concatenate([getattr(batch, name) for batch in batches]).tolist() for batches in (one, two)]
        assert joined[0] == joined[1]
    assert sum(batch.size for batch in two) == source.size


KILLED = """
import os, sys
from pathlib import Path
from mgpu_pipe.data.text import encode_source
encode_source._POOL_FROM_CHARACTERS = 1 << 19
from mgpu_pipe.data.text.prepare_text import prepare
from tests.data.support import config
run = config(Path(sys.argv[1]), source="text_files", paths=[sys.argv[1] + "/corpus/*.txt"], tokenize_workers=2,
             tokenizer=sys.argv[2])
def told(stage, done, total):
    if stage == "tokenise":
        print(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(), flush=True)
        sys.stdin.readline()
prepare(run, told)
"""


def _alive(process_id: str) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_tokenising_processes_die_with_a_killed_parent(tmp_path: Path) -> None:
    tokenizer = prepare(text_files(tmp_path / "small")).tokenizer_folder
    _long_corpus(tmp_path)
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(tokenizer)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    children = parent.stdout.readline().split()
    assert len([child for child in children if _alive(child)]) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if _alive(child)]


def test_the_held_out_documents_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    first, second = prepare(run), prepare(replace(run, seed=run.seed + 1))
    assert first == second
    assert first.validation is not None
    assert first.validation.documents == 1
    assert first.train.documents == 19


def test_held_out_paths_are_all_of_the_held_out_documents(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    (tmp_path / "held.txt").write_text(sentences(99, 300), encoding="utf-8")
    run.data.validation_paths = [str(tmp_path / "*.txt")]
    prepared = prepare(run)
    assert prepared.validation is not None
    assert (prepared.train.documents, prepared.validation.documents, prepared.num_documents) == (20, 1, 21)
    assert prepared.validation.tokens != prepared.train.tokens


def test_unigram_perplexity_is_that_of_a_plain_count(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    run.data.validation_fraction, run.data.validation_max_samples = 0.3, 3
    prepared = prepare(run)
    labels = {}
    for split in ("train", "validation"):
        dataset = PackedDataset.open(prepared, split)
        chosen = np.arange(len(dataset)) if split == "train" else prepared.evaluated_samples()
        labels[split] = [n for n in dataset.batch(chosen)["labels"].flatten().tolist() if n != IGNORE_INDEX]
    counts = Counter(labels["train"])
    surprise = [-log((counts[n] + 1) / (len(labels["train"]) + prepared.vocab_size)) for n in labels["validation"]]
    assert prepared.unigram_perplexity == pytest.approx(exp(sum(surprise) / len(surprise)), rel=1e-12)
    assert prepared.train_tokens == len(labels["train"])
    assert prepared.validation_tokens == len(labels["validation"])
    text = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json")).decode(labels["validation"])
    assert prepared.validation_bytes == len(text.encode())


def test_bytes_are_counted_for_byte_level_tokenizers_alone(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    vocabulary = {"a": 0, "Ġwé": 1, "<end>": 2, "né": 3}
    added = [{"id": 2, "content": "<end>", "special": True}, {"id": 3, "content": "né", "special": False}]
    record = {"model": {"vocab": vocabulary}, "added_tokens": added, "decoder": {"type": "ByteLevel"}}
    file.write_text(json.dumps(record))
    assert token_bytes(tmp_path, 5) == [1, 3, 0, 3, 0], "a byte of a byte-level token is a character"
    file.write_text(json.dumps({**record, "decoder": {"type": "Sequence", "decoders": [{"type": "Metaspace"}]}}))
    assert token_bytes(tmp_path, 5) is None


def test_data_with_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    run.data.tokenizer = str(prepare(run).tokenizer_folder)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    with pytest.raises(DataError, match="there is nothing to train on: 1 training documents give no token"):
        prepare(config(tmp_path, source="jsonl", paths=[str(tmp_path / "empty.jsonl")], tokenizer=run.data.tokenizer))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    (tmp_path / "file").write_text("in the way")
    for place in ("file", "file/below"):
        run.data.cache_dir = str(tmp_path / place)
        with pytest.raises(ConfigError, match=r"data\.cache_dir=.*: the cache cannot be written"):
            prepare(run)


def test_abandoned_work_is_cleared_away(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    name = prepare(run).folder.name
    tokens = tmp_path / "cache" / "tokens"
    (tokens / name / "manifest.json").unlink()
    (tokens / f"{name}.partial-1").mkdir()
    (tokens / f"{name}.partial-1" / "tokens.bin").write_bytes(b"half")
    prepare(run)
    assert not list(tokens.glob("*.partial-*"))


def _rewrite(path: Path) -> None:
    """Other content of the same size, with the old times."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    at = content.index(b"the") if b"the" in content else len(content) // 2
    content[at] = ord("T")
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "rewritten": _rewrite,
    "grown": lambda path: path.write_bytes(path.read_bytes() + b'{"text": "more"}\n'),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "gone": lambda path: path.unlink(),
}


def _corpus(tmp_path: Path, source: str) -> Path:
    """A file of two batches."""
    texts = [sentences(number, 60) for number in range(1500)]
    if source == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", compression="none")
        return tmp_path / "a.parquet"
    if source == "jsonl":
        return write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    (tmp_path / "a.txt").write_text("".join(texts), encoding="utf-8")
    return tmp_path / "a.txt"


@pytest.mark.parametrize(
    ("change", "source", "stage"),
    one_in(5, product(CHANGES, ("text_files", "jsonl", "parquet"), ("hash", "train tokenizer"))),
)
def test_data_that_changes_while_it_is_prepared_is_refused_and_prepared_afresh_next_time(
    stage: str, source: str, change: str, tmp_path: Path
) -> None:
    """Oracle: a preparation of the changed file in a cache of its own."""
    path = _corpus(tmp_path, source)
    run = config(tmp_path, source=source, paths=[str(path)], validation_fraction=0.0)
    changed = []

    def change_once(told: str, done: int, total: int) -> None:
        if told == stage and done == total and not changed:
            changed.append(CHANGES[change](path))

    with pytest.raises(DataError, match=r"a\.\w+: (changed while it was being prepared|cannot be read)") as told:
        prepare(run, change_once)
    assert changed and "\n" not in str(told.value)
    if change == "gone" or (source == "parquet" and change != "rewritten") or (source, change) == ("jsonl", "cut"):
        with pytest.raises((DataError, ConfigError)):
            prepare(run)
        return
    again = prepare(run)
    fresh = prepare(replace(run, data=replace(run.data, cache_dir=str(tmp_path / "other"))))
    assert again.digest == fresh.digest
    assert TokenStore.open(again.folder).tokens.tolist() == TokenStore.open(fresh.folder).tokens.tolist()


def test_a_tokenizer_that_changes_while_it_is_copied_is_kept_as_it_was_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = text_files(tmp_path)
    made = prepare(run).tokenizer_folder
    own = tmp_path / "own"
    shutil.copytree(made, own)
    content = (own / "tokenizer.json").read_bytes()
    run.data.tokenizer = str(own)
    usual = tokenizer_module._end_of_sequence

    def overwritten(*arguments: object) -> object:
        (own / "tokenizer.json").write_text("{}")
        return usual(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizer_module, "_end_of_sequence", overwritten)
    assert (prepare(run).tokenizer_folder / "tokenizer.json").read_bytes() == content


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "document_hashes.npy", "start.npy", "tokenizer.json"])
def test_a_flipped_bit_in_the_cache_is_named_and_the_data_made_again(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = text_files(tmp_path)
    first = prepare(run)
    folder = next(at for at in (first.folder, first.train.packs, first.tokenizer_folder) if (at / name).exists())
    content = (folder / name).read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    (folder / name).write_bytes(flipped)
    assert prepare(run) == first
    assert (folder / name).read_bytes() == content
    assert caplog.text.count(f"{folder / name}: block 0 of 1 (of 4 MiB each) is damaged") == 1


def test_a_cache_of_an_earlier_version_is_made_again_and_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = text_files(tmp_path)
    first = prepare(run)
    manifest = first.folder / "manifest.json"
    earlier = json.loads(manifest.read_text())
    del earlier["sha256"]
    manifest.write_text(json.dumps(earlier))
    assert prepare(run) == first
    assert f"{first.folder}: was written by an earlier version; it is prepared again" in caplog.text
    assert "damaged" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("packs", "samples"),
        ("packs", "valid_tokens"),
        ("tokens", "documents"),
        ("tokens", "files"),
        ("tokenizer", "vocab_size"),
    ],
)
@pytest.mark.parametrize("where", ["name", "value"])
def test_a_flipped_bit_in_a_manifest_changes_nothing(tmp_path: Path, kind: str, field: str, where: str) -> None:
    run = text_files(tmp_path)
    first = prepare(run)
    folders = {"packs": first.train.packs, "tokens": first.folder, "tokenizer": first.tokenizer_folder}
    at = folders[kind] / "manifest.json"
    content = at.read_bytes()
    flipped = bytearray(content)
    place = content.index(f'"{field}": '.encode())
    flipped[place + (2 if where == "name" else len(field) + 4)] ^= 1
    at.write_bytes(flipped)
    assert prepare(run) == first
    assert at.read_bytes() == content


def test_a_flipped_bit_in_the_remembered_hashes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_RACY_NS", 0)  # files so young are hashed again each time
    run = text_files(tmp_path)
    first = prepare(run)
    (index,) = (tmp_path / "cache" / "fingerprints").iterdir()
    content = index.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(b'"blocks": ') + 30] ^= 1  # still the name of a hash
    index.write_bytes(flipped)
    assert prepare(run) == first


def test_hashes_are_compared_once_a_start_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = text_files(tmp_path)
    first = prepare(run)
    hashed: list[Path] = []

    def note(path: Path) -> list[str]:
        hashed.append(path)
        return hash_blocks(path)

    monkeypatch.setattr(cache_module, "hash_blocks", note)
    assert prepare(run) == first and hashed == []
    (tmp_path / "boot").write_text("another start")
    monkeypatch.setattr(cache_module, "_BOOT_ID", tmp_path / "boot")
    assert prepare(run) == first and {path.parent for path in hashed} >= {first.folder, first.train.packs}
    hashed.clear()
    assert prepare(run) == first and hashed == []


def test_changed_held_out_files_change_their_digest_alone(tmp_path: Path) -> None:
    run = text_files(tmp_path)
    held = tmp_path / "held.txt"
    held.write_text(sentences(99, 50), encoding="utf-8")
    assert prepare(run).validation_digest == ""
    run.data.validation_paths = [str(held)]
    first = prepare(run)
    held.write_text(sentences(98, 50), encoding="utf-8")
    second = prepare(run)
    assert first.validation_digest != second.validation_digest and "" not in (first.validation_digest, second.digest)
    assert first.digest == second.digest
