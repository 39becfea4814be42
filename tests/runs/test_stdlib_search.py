"""The experiment stdlib_search, four steps long, on few pairs; the library's own take a minute to tokenise."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command import mgpu, run_folder
from tests.support.embedding_pairs import write_pairs


def test_four_steps_measure_the_search(cache: Path, tmp_path: Path) -> None:
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "scheduler.warmup_steps=1", "logger=none")
    small = ("data.global_batch_size=16", "data.micro_batch_size=4", "data.seq_len=24", "data.validation_fraction=0.25")
    pairs = ("data=embedding_pairs", f"data.paths=[{write_pairs(tmp_path / 'pairs.jsonl')}]")
    folder = run_folder(mgpu(cache, tmp_path, "experiment=stdlib_search", *pairs, *short, *small))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["model"]["class"] == "BertModel"
    metrics = summary["metrics"]
    assert 0 < metrics["val/recall@1"] <= metrics["val/mrr@10"] <= metrics["val/recall@10"] <= 1
