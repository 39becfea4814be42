"""What a run says of its speed: the tokens that the model computes, whatever carries a loss. Oracle: a plain count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.support import CHATML, sentences, write_jsonl
from tests.support.command import column, mgpu, run_folder

SEQ_LEN, BATCH, STEPS = 64, 8, 6


def test_chat_counts_all_tokens_that_pass_the_model_and_tells_padding_apart(cache: Path, tmp_path: Path) -> None:
    """Few labels carry a loss here, and half of each sample is padding: neither makes the step look slower."""
    talk = [{"role": "user", "content": sentences(1, 9)}, {"role": "assistant", "content": "Yes."}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": talk}] * 24)
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    out = mgpu(
        cache,
        tmp_path,
        "model=llama_tiny",
        "model.config.num_hidden_layers=1",
        "model.config.vocab_size=300",
        "data=chat_jsonl",
        "data.paths=[chat.jsonl]",
        "data.chat_template=chat.jinja",
        "data.packing=none",
        f"data.seq_len={SEQ_LEN}",
        f"data.global_batch_size={BATCH}",
        "data.validation_fraction=0",
        "strategy=single",
        f"trainer.max_steps={STEPS}",
        "logger=none",
        "trainer.accelerator=cpu",
    )
    folder = run_folder(out)
    summary = json.loads((folder / "summary.json").read_text())
    held = summary["data"]["num_tokens"] / summary["data"]["num_documents"]
    assert held < SEQ_LEN, "each sample is one document and padding"
    seconds, tokens = column(folder, "throughput/step_s"), column(folder, "throughput/tokens_per_s")
    for step, duration in seconds.items():
        assert tokens[step] == pytest.approx(BATCH * SEQ_LEN / duration)
        assert column(folder, "throughput/samples_per_s")[step] == pytest.approx(BATCH / duration)
        assert column(folder, "throughput/padding")[step] == pytest.approx(1 - held / SEQ_LEN)
    metrics = summary["metrics"]
    assert metrics["throughput/samples_per_s"] * SEQ_LEN == pytest.approx(metrics["throughput/tokens_per_s"])
    assert f"({100 * (1 - held / SEQ_LEN):.1f}% padding)" in out and " samples/s" in out
