"""Files of texts encoded by real processes. Oracle: ``encode`` of sentence-transformers on the exported folder; of the
processes, a job of one.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from mgpu_pipe.checks.notices import notices
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.objective import description
from mgpu_pipe.data import files
from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig
from mgpu_pipe.inference.batch import encode
from tests.inference.support import WORDS, write_run, write_texts
from tests.support.command import mgpu, run_folder
from tests.support.embedding_pairs import write_pairs
from tests.support.real_folders import need_minilm

REASON = "sentence-transformers loads the exported folder: pip install sentence-transformers"
TEXTS = [" ".join(WORDS[(at * 3 + k) % len(WORDS)] for k in range(1 + at * at % 37)) for at in range(75)]
PROMPTS = ("data.query_prompt='find: '", "data.document_prompt='text: '")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder with a run of embeddings, its export, and the texts as lines of JSON."""
    folder = tmp_path_factory.mktemp("encode")
    data = ("data=embedding_pairs", f"data.paths=[{write_pairs(folder / 'pairs.jsonl')}]", "data.seq_len=24", *PROMPTS)
    small = ("model=bert_tiny", "model.config.vocab_size=384", "strategy=single", "trainer.accelerator=cpu")
    sizes = ("objective=text_embedding", "objective.matryoshka_sizes=[16]", "trainer.max_steps=2", "trainer.devices=1")
    mgpu(cache, folder, *data, *small, *sizes, "run.dir=run")
    mgpu(cache, folder, "export", "run", "--out", "exported")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def vectors_of(place: Path, model: str, name: str, *words: str, given: str = "texts.jsonl") -> Any:
    """Vectors that a job of this process writes."""
    out = place / name
    assert main(["encode", str(place / model), "--input", str(place / given), "--output", str(out), *words]) == 0
    assert not out.with_name(f"{name}.unfinished").exists()
    if out.suffix == ".npy":
        return np.load(out)
    table = pq.read_table(out)
    assert table["row"].to_pylist() == list(range(1, 1 + len(table)))
    assert pa.types.is_fixed_size_list(table["vector"].type) and table["vector"].type.value_type == pa.float32()
    return np.stack(table["vector"].to_numpy())


def test_vectors_are_those_of_sentence_transformers(place: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    published = library.SentenceTransformer(str(place / "exported"), device="cpu")
    assert 'SentenceTransformer("exported")' in (place / "exported" / "README.md").read_text()
    assert max(len(published.tokenizer(text)["input_ids"]) for text in TEXTS) > 24, "no text is cut"
    for model in ("run", "exported"):
        plain = vectors_of(place, model, f"plain-{model}.parquet", "--batch-size", "7")
        np.testing.assert_allclose(plain, published.encode(TEXTS), atol=1e-6)
        query = vectors_of(place, model, f"query-{model}.npy", "--prompt", "query", "--size", "16")
        expected = published.encode(TEXTS, prompt_name="query", truncate_dim=16, normalize_embeddings=True)
        np.testing.assert_allclose(query, expected, atol=1e-6)


WIDTH = {"word_embedding_dimension": 64}
LIBRARY = "sentence_transformers."
MODULES = (f"{LIBRARY}base.modules.transformer.Transformer", f"{LIBRARY}sentence_transformer.modules.pooling.Pooling")
LAYOUTS: dict[str, tuple[str, Any]] = {
    "no mode is the mean": ("1_Pooling/config.json", WIDTH),
    "nor is a mode that is false": ("1_Pooling/config.json", {**WIDTH, "pooling_mode_cls_token": False}),
    "version 6": ("1_Pooling/config.json", {"embedding_dimension": 64, "pooling_mode": ["cls"]}),
    "modules of version 6": (
        "modules.json",
        [{"idx": at, "name": str(at), "path": ["", "1_Pooling"][at], "type": kind} for at, kind in enumerate(MODULES)],
    ),
    "length of a RoBERTa": ("sentence_roberta_config.json", {"max_seq_length": 9, "do_lower_case": False}),
    "default prompt": (
        "config_sentence_transformers.json",
        {"prompts": {"passage": "say: "}, "default_prompt_name": "passage"},
    ),
}


def changed(place: Path, tmp_path: Path, name: str, content: Any) -> Path:
    """The exported folder with another content of a file."""
    folder = shutil.copytree(place / "exported", tmp_path / "folder")
    if name.startswith("sentence_roberta"):
        (folder / "sentence_bert_config.json").unlink()
    (folder / name).write_text(json.dumps(content))
    return Path(folder)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_folders_of_other_versions_have_the_librarys_vectors(place: Path, tmp_path: Path, layout: str) -> None:
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    folder = changed(place, tmp_path, *LAYOUTS[layout])
    found = vectors_of(place, str(folder), f"{layout}.npy")
    np.testing.assert_allclose(found, library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS), atol=1e-6)


STRANGE: list[tuple[str, Any, str]] = [
    ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, r"has no mean\+cls; measure it with"),
    ("modules.json", [{"type": f"{LIBRARY}models.{kind}", "path": kind} for kind in ("Dense",)], "has no Dense;"),
    ("modules.json", [{"type": f"{LIBRARY}models.Transformer", "path": ""}], "has no folder without Pooling;"),
    ("modules.json", [{"type": "theirs.Transformer", "path": ""}], "has no theirs.Transformer;"),
    ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim=8 is not read; .* by --size 8"),
]


@pytest.mark.parametrize(("name", "content", "reason"), STRANGE)
def test_modules_that_no_run_has_are_refused(
    place: Path, tmp_path: Path, name: str, content: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(place, tmp_path, name, content)
    words = ["encode", str(folder), "--input", str(place / "texts.jsonl"), "--output", str(tmp_path / "out.npy")]
    assert main(words) == 2
    assert re.search(reason, capsys.readouterr().err)


def test_training_says_what_it_does_not_take_from_the_folder(place: Path, tmp_path: Path) -> None:
    folder = changed(place, tmp_path, "1_Pooling/config.json", {"pooling_mode": "cls"})
    words = ("model=hf", f"model.path={folder}", "objective=text_embedding", "data=stdlib_pairs", "data.seq_len=24")

    def noticed(*more: str) -> dict[str, str]:
        said = notices(compose([*words, "trainer.accelerator=cpu", *more])[0])
        return {notice.key: notice.text for notice in said if notice.key.startswith(("objective", "data", "model.p"))}

    assert noticed("objective.pooling=cls", *PROMPTS) == {}
    said = noticed()
    assert "are made by cls" in said["objective.pooling"] and "the prompt 'find: '" in said["data.query_prompt"]
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    assert "does not train the vectors of this folder" in noticed()["model.path"]


def test_the_words_of_an_old_bert_are_its_tokenizer(place: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(words), intermediate_size=16, **sizes)).save_pretrained(tmp_path)
    for name, content in (
        description("text_embedding").keys().folder_files(EmbeddingPairsConfig(seq_len=24), 16).items()
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    shutil.copyfile(place / "texts.jsonl", tmp_path / "texts.jsonl")
    found = vectors_of(tmp_path, "", "old.npy")
    np.testing.assert_allclose(found, library.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), atol=1e-6)


def test_a_folder_without_a_pooler_has_the_same_vectors(place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place / "exported", tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(
        vectors_of(place, str(folder), "unread.npy"), vectors_of(place, "exported", "read.npy")
    )


def test_processes_and_windows_change_nothing(place: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = vectors_of(place, "run", "one.npy", "--batch-size", "4")
    words = ("run", "--input", "texts.jsonl", "--output", "two.npy", "--batch-size", "4", "--processes", "2")
    assert mgpu(cache, place, "encode", *words, "trainer.accelerator=cpu") == ""
    assert (place / "two.npy").read_bytes() == (place / "one.npy").read_bytes()
    monkeypatch.setattr(encode, "WINDOW", 9)
    np.testing.assert_allclose(vectors_of(place, "run", "windows.npy"), one, atol=1e-6)


@pytest.mark.parametrize("longest", [26, None])
def test_a_text_is_cut_where_roberta_has_no_more_positions(place: Path, tmp_path: Path, longest: int | None) -> None:
    """26 positions are 24 tokens, for the first two are those of padding; sentence-transformers runs past the end."""
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    folder = shutil.copytree(place / "exported", tmp_path / "roberta")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=384, max_position_embeddings=26, pad_token_id=1, **sizes)
    RobertaModel(config).save_pretrained(folder)
    shape = folder / "sentence_bert_config.json"
    shape.write_text(json.dumps({"max_seq_length": longest, "do_lower_case": False}))
    found = vectors_of(place, str(folder), f"roberta-{longest}.npy")
    published = library.SentenceTransformer(str(folder), device="cpu")
    with pytest.raises((IndexError, RuntimeError)):
        published.encode(TEXTS)
    published.max_seq_length = 24
    np.testing.assert_allclose(found, published.encode(TEXTS), atol=1e-6)


def test_a_text_without_tokens_is_one_line(
    place: Path, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sentence-transformers gives it a vector of zeros beside other texts, and fails alone."""
    folder = shutil.copytree(place / "exported", tmp_path / "quiet")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = tmp_path / "texts.txt"
    texts.write_text("some words\n~ ~\n~\nmore\n")
    words = ["encode", str(folder), "--input", str(texts), "--batch-size", "1"]
    said = f"error: {texts}: row 3 has no tokens; correct or remove it\n"
    assert main([*words, "--output", str(tmp_path / "one.npy")]) == 2
    assert capfd.readouterr().err.endswith(said)
    two = [*words, "--output", "two.npy", "--processes", "2", "trainer.accelerator=cpu"]
    assert said in mgpu(cache, tmp_path, *two, code=2)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(("one", "two"))], "no process began"


@pytest.mark.parametrize("given", ["texts.csv", "texts.parquet", "texts.txt"])
def test_every_format_of_texts_is_read(place: Path, given: str) -> None:
    texts, column = TEXTS[:5], ("--column", "said")
    if given == "texts.parquet":
        pq.write_table(pa.table({"said": texts}), place / given)
    else:
        head = "" if given == "texts.txt" else "said\n"
        (place / given).write_text(head + "".join(text + "\n\n" for text in texts))
    found = vectors_of(place, "run", f"{given}.npy", *column, given=given)
    np.testing.assert_allclose(found, vectors_of(place, "run", f"{given}-all.npy")[:5], atol=1e-6)


def test_an_unfinished_job_computes_what_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = vectors_of(place, "run", "whole.npy", "--batch-size", "10"), list[int]()
    compute = encode.TextEncoder.encode

    def stops(self: Any, texts: Any) -> Any:
        calls.append(len(texts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute(self, texts)

    monkeypatch.setattr(encode.TextEncoder, "encode", stops)
    words = ["--input", str(place / "texts.jsonl"), "--output", str(place / "stopped.npy"), "--batch-size", "10"]
    assert encode_main(place, *words) not in (0, 2)
    part = place / "stopped.npy.unfinished" / "rank-00000.bin"
    with part.open("ab") as file:
        file.write(b"torn")  # a kill in the middle of a write
    assert encode_main(place, *words, "--prompt", "query") == 2
    assert encode_main(place, *words) == 0
    assert calls == [10] * 8 + [5], "30 rows were there"
    np.testing.assert_array_equal(np.load(place / "stopped.npy"), whole)


def encode_main(place: Path, *words: str) -> int:
    return main(["encode", str(place / "run"), *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--input", "nosuch.jsonl"], "--input=nosuch.jsonl: no such file"),
        (["--column", "body"], "texts.jsonl:1: has no column 'body'; set --column to one that is there: text"),
        (["--input", "empty.jsonl"], "empty.jsonl:2: column 'text' is empty"),
        (["--input", "numbers.jsonl"], "numbers.jsonl:1: column 'text' holds int, not a string"),
        (["--output", "x.csv"], "--output=x.csv: unknown ending; let it end in .parquet or .npy"),
        (["--output", "there.npy"], "exists already"),
        (["--size", "65"], "--size=65: the model's vectors have 64 numbers"),
        (["--prompt", "title"], "--prompt=title: the model has no such prompt (it has query, document)"),
        (["optimizer.lr=1"], "optimizer.lr=1: encode takes trainer.devices"),
        (["--device", "cpu", "--processes", "2"], "--device=cpu: goes with one process"),
    ],
)
def test_wrong_jobs_are_one_line(
    place: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "empty.jsonl").write_text('{"text": "a"}\n{"text": " "}\n')
    (place / "numbers.jsonl").write_text('{"text": 1}\n')
    (place / "there.npy").touch()
    default = [
        word for pair in (["--input", "texts.jsonl"], ["--output", "x.npy"]) if pair[0] not in words for word in pair
    ]
    assert main(["encode", "run", *default, *words]) == 2
    told = capfd.readouterr().err
    assert said in told.replace(f"{place}/", "") and told.count("\n") == 1
    assert not list(place.glob("*.unfinished"))


def test_models_without_vectors_are_refused(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "llama", "llama", write_texts(tmp_path / "texts", 2), tmp_path / "cache")
    plain = shutil.copytree(place / "exported", tmp_path / "plain")
    (plain / "modules.json").unlink()
    dense = shutil.copytree(place / "exported", tmp_path / "dense")
    modules = json.loads((dense / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (dense / "modules.json").write_text(json.dumps(modules))
    other = shutil.copytree(place / "exported", tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    for folder, said in (
        (tmp_path / "llama", "learned objective=causal_lm; give a run of objective=text_embedding"),
        (plain, "has no modules.json"),
        (dense, "objective=text_embedding has no Dense"),
        (other, "gpt2"),
    ):
        words = ["--input", str(place / "texts.jsonl"), "--output", str(tmp_path / "x.npy")]
        assert main(["encode", str(folder), *words]) == 2
        told = capfd.readouterr().err
        assert said in told and told.count("\n") == 1, told


DATA = ("data=stdlib_pairs", "data.seq_len=32", "data.validation_max_samples=200")


def write_docstrings(path: Path) -> list[str]:
    """Writes 12 paragraphs of the library's sources, one of which is cut, and returns them."""
    paragraphs = [part for file in files.stdlib_files()[:12] for part in file.read_text("utf-8").split("\n\n")]
    texts = [text.strip() for text in paragraphs if text.strip()][:11] + ["and so on " * 200]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


@pytest.mark.slow
def test_import_export_and_encode_keep_the_vectors(tmp_path: Path, cache: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    published = need_minilm()
    texts = write_docstrings(tmp_path / "texts.jsonl")
    pickled = shutil.copytree(published, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    words = ("--from", "pickled", "--out", "imported", "--tokenizer", str(published), "model=hf", "model.path=pickled")
    mgpu(cache, tmp_path, "import", *words)
    mgpu(cache, tmp_path, "export", "imported", "--out", "exported")
    expected = library.SentenceTransformer(str(published), device="cpu").encode(texts)
    for folder in ("imported", "exported"):
        found = library.SentenceTransformer(str(tmp_path / folder), device="cpu").encode(texts)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    for number, folder in enumerate((published, "exported")):
        mgpu(cache, tmp_path, "encode", str(folder), "--input", "texts.jsonl", "--output", f"{number}.npy")
        np.testing.assert_allclose(np.load(tmp_path / f"{number}.npy"), expected, atol=1e-6)


@pytest.mark.exhaustive
def test_more_functions_are_found_after_training(tmp_path: Path, cache: Path) -> None:
    """The vectors after it are sentence-transformers' too."""
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    published, sizes = need_minilm(), ("data.global_batch_size=16", "data.micro_batch_size=16", "optimizer.lr=5e-5")
    before = mgpu(cache, tmp_path, "eval", str(published), "--device", "cpu", *DATA)
    steps = ("trainer.max_steps=24", "trainer.devices=1", "trainer.accelerator=cpu", "strategy=single", "logger=none")
    words = ("objective=text_embedding", "model=hf", f"model.path={published}", *sizes, *steps)
    run = str(run_folder(mgpu(cache, tmp_path, *DATA, *words)))
    after = mgpu(cache, tmp_path, "eval", run, "--device", "cpu")
    print(f"{before}\n{after}")
    assert recall(after) > recall(before)
    texts = write_docstrings(tmp_path / "texts.jsonl")
    mgpu(cache, tmp_path, "export", run, "--out", "exported")
    mgpu(cache, tmp_path, "encode", run, "--input", "texts.jsonl", "--output", "vectors.npy")
    expected = library.SentenceTransformer(str(tmp_path / "exported"), device="cpu").encode(texts)
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), expected, atol=1e-6)


def recall(out: str) -> float:
    """Recall at 10 that ``eval`` printed, in percent."""
    [percent] = re.findall(r"^recall@10\s+([\d.]+)%", out, re.MULTILINE)
    return float(percent)
