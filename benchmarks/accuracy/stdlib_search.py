"""How well ``experiment=stdlib_search`` finds functions by their docstrings, compared with BM25.

The peer is the bm25s package's BM25 over words of identifiers. Queries and functions are those that the experiment
holds out: whole modules of Python's standard library.

``python -m benchmarks.accuracy.stdlib_search [ENCODER]``: ENCODER is the folder of a published encoder, such as
all-MiniLM-L6-v2, whose vectors are measured too, before and after fine-tuning on the same pairs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import bm25s
import numpy as np
import torch

from benchmarks.support import finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.inference.batch.mine_negatives import rows_of_run
from mgpu_pipe.inference.find_model import find_model
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.runs.metrics_file import read_metrics

EXPERIMENT = "experiment=stdlib_search"
FINE_TUNING = (
    *("objective=text_embedding", "objective.symmetric=true", "strategy=ddp", "trainer.devices=2", "precision=fp32"),
    *("data.global_batch_size=64", "data.micro_batch_size=32", "optimizer.lr=5e-5", "scheduler=cosine"),
    *("scheduler.warmup_steps=5", "trainer.max_steps=40", "trainer.val_every_n_steps=40"),
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""A word of an identifier: HTTP and Server of ``HTTPServer``, read and file of ``read_file``."""
RANKS = (1, 10)


def held_out_pairs(folder: Path) -> list[tuple[str, str]]:
    """Query and function of each pair that the run in ``folder`` held out."""
    rows = rows_of_run(load_run(find_model(folder), torch.device("cpu")), "validation")
    return [(str(row["query"]), str(row["positive"])) for row in rows]


def bm25_recall(pairs: Sequence[tuple[str, str]], words_of: Callable[[str], list[str]]) -> list[float]:
    """Share of a query's functions among the first of :data:`RANKS`, over distinct queries and functions."""
    functions = {function: index for index, function in enumerate(dict.fromkeys(pair[1] for pair in pairs))}
    wanted: dict[str, set[int]] = {}
    for query, function in pairs:
        wanted.setdefault(query, set()).add(functions[function])
    search = bm25s.BM25()
    search.index([words_of(function) for function in functions], show_progress=False)
    found = []
    for query, right in wanted.items():
        order = np.argsort(-search.get_scores(words_of(query)), kind="stable")
        found.append([len(right & set(order[:rank].tolist())) / len(right) for rank in RANKS])
    return [float(share) for share in np.mean(found, 0)]


def words_of_identifiers(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def data_words() -> list[str]:
    """Overrides that give another run the experiment's pairs."""
    data = compose([EXPERIMENT])[0].data
    keys = ("validation_fraction", "seq_len")
    words = [f"data.{key}={getattr(data, key)}" for key in keys]
    return ["data=stdlib_pairs", "data.validation_max_samples=null", *words]


def trained_recall(folder: Path, *overrides: str) -> list[float]:
    """Recall of a run after its last step."""
    run = RunPaths(folder)
    subprocess.run([sys.executable, "-m", "mgpu_pipe", f"run.dir={folder}", *overrides], check=True)
    metrics = read_metrics(run.metrics)
    return [metrics[f"val/recall@{rank}"][-1] for rank in RANKS]


def published_recall(encoder: str) -> list[float]:
    command = [sys.executable, "-m", "mgpu_pipe", "eval", encoder, *data_words()]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [float(re.findall(rf"^recall@{rank}\s+([\d.]+)%", out, re.MULTILINE)[0]) / 100 for rank in RANKS]


def main(encoder: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        nothing = Path(folder) / "nothing"
        recall = trained_recall(nothing, EXPERIMENT)
        pairs = held_out_pairs(nothing)
        peer = bm25_recall(pairs, words_of_identifiers)
        found = [
            ("BM25, words of identifiers", peer),
            ("BM25, whole words", bm25_recall(pairs, lambda text: re.findall(r"\w+", text.lower()))),
            (EXPERIMENT, recall),
        ]
        if encoder is not None:
            name = Path(encoder).name
            found.append((f"{name} as published", published_recall(encoder)))
            words = ("model=hf", f"model.path={encoder}", *data_words(), *FINE_TUNING)
            found.append((f"{name} fine-tuned", trained_recall(Path(folder) / "tuned", *words)))
    columns = ["search", *(f"recall@{rank}" for rank in RANKS), "recall@10 over BM25's"]
    rows = [[name, *recall, recall[-1] / peer[-1]] for name, recall in found]
    notes = f"{len({query for query, _ in pairs})} queries, {len({function for _, function in pairs})} functions."
    finish("stdlib_search", "functions of held-out modules, found by their docstrings", columns, rows, notes)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
