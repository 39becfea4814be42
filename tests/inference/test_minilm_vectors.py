"""Vectors of all-MiniLM-L6-v2 as published. Oracle: sentence-transformers on the published folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mgpu_pipe.data import files
from tests.inference.test_encode import REASON
from tests.support.command import mgpu, run_folder
from tests.support.real_folders import need_minilm

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
