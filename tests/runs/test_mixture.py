"""A mixture of three sources, stopped and gone on with on other processes. Oracle: the uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.support import sentences, write_jsonl
from tests.support.command import column, mgpu, run_folder


@pytest.mark.slow
def test_a_mixture_goes_on_with_the_same_samples_on_other_processes(cache: Path, corpus: Path, tmp_path: Path) -> None:
    rows = [{"prompt": sentences(n, 4), "completion": sentences(-n, 1 + n % 9)} for n in range(200)]
    chat = write_jsonl(tmp_path / "chat.jsonl", rows)
    web = write_jsonl(tmp_path / "web.jsonl", [{"text": sentences(n, 5 + n % 90)} for n in range(300)])
    words = (
        "model=llama_tiny",
        "data=mixture",
        f"data.sources={{lib: {{source: text_files, paths: ['{corpus}/*.txt'], weight: 5}}, "
        f"web: {{paths: [{web}], weight: 3}}, chat: {{source: chat_jsonl, paths: [{chat}], weight: 2}}}}",
        "data.chat_template=chatml",
        "data.seq_len=64",
        "data.global_batch_size=12",
        "data.validation_max_samples=24",
        "precision=fp32",
        "scheduler.total_steps=8",
        "trainer.val_every_n_steps=5",
        "logger=none",
    )
    whole = run_folder(mgpu(cache, tmp_path, *words, "trainer.max_steps=8", "run.dir=whole"))
    mgpu(cache, tmp_path, *words, "trainer.max_steps=5", "run.dir=cut", "strategy=fsdp", "trainer.devices=3")
    again = ("trainer.max_steps=8", "run.dir=cut", "checkpoint.resume=auto", "strategy=ddp", "trainer.devices=2")
    cut = run_folder(mgpu(cache, tmp_path, *words, *again))
    for name in ("tokens/lib", "tokens/web", "tokens/chat"):
        assert column(cut, name) == column(whole, name)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        one, other = column(cut, name), column(whole, name)
        assert one.keys() == other.keys()
        assert max(abs(one[step] / other[step] - 1) for step in one) < 1e-5, name
    summary = json.loads((cut / "summary.json").read_text(encoding="utf-8"))
    totals = {name: summary["metrics"][f"tokens/{name}"] for name in ("lib", "web", "chat")}
    assert totals["lib"] > totals["web"] > totals["chat"] > 0 and sum(totals.values()) <= 8 * 12 * 64
    lighter = [word.replace("weight: 5", "weight: 4") for word in words]
    out = mgpu(cache, tmp_path, *lighter, "trainer.max_steps=9", *again[1:3], code=2)
    assert "checkpoint.resume" in out and "data.sources.lib.weight" in out, out
