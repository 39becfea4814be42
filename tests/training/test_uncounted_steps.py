"""A run over steps that hold no trained token ends, and a resume over one gives the same weights."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from tests.support import small_runs

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)


def chats(folder: Path, *overrides: str) -> RunConfig:
    """Conversations, a step each; in every second one the answer is empty."""
    if not (folder / "chats.jsonl").exists():
        (folder / "chat.jinja").write_text(TEMPLATE)
        answers = ["" if number % 2 else f"It is {number}." for number in range(20)]
        talks = [[{"role": "user", "content": "And?"}, {"role": "assistant", "content": answer}] for answer in answers]
        (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    data = ("data=chat_jsonl", f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    rows = ("data.packing=none", "data.seq_len=48", "data.global_batch_size=1", "data.validation_fraction=0")
    more = (f"data.chat_template={folder / 'chat.jinja'}", "data.num_workers=0", "logger=none", "trainer.progress=off")
    saved = ("trainer.max_steps=6", "checkpoint.every_n_steps=1", "checkpoint.keep_last=0")
    return compose(["model=llama_tiny", "model.config.vocab_size=300", *data, *rows, *more, *saved, *overrides])[0]


def rows_of(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_resume_over_a_step_without_a_trained_token_is_the_uninterrupted_run(tmp_path: Path) -> None:
    small_runs.run(chats, tmp_path / "whole", 1, "strategy=single")
    rows = rows_of(tmp_path / "whole")
    silent = [int(row["step"]) for row in rows if not row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6] and 0 < len(silent) < 6
    step = next(step for step in silent if 1 < step < 6)
    steps = {at: tmp_path / "whole" / "checkpoints" / f"step-{at:08}" for at in (step - 1, step, 6)}
    small_runs.run(chats, tmp_path / "second", 1, "strategy=single", resume=steps[step - 1])
    resumed = tmp_path / "second" / "checkpoints"
    for name in ("model-00000.safetensors", "optimizer-00000.safetensors"):
        before, after, last = (load_file(steps[at] / name) for at in (step - 1, step, 6))
        assert all(torch.equal(before[key], after[key]) for key in before), "the step changes nothing"
        assert any(not torch.equal(after[key], last[key]) for key in after), "later ones do"
        again = load_file(resumed / steps[6].name / name)
        assert again.keys() == last.keys() and all(torch.equal(again[key], last[key]) for key in last)
    assert [int(row["step"]) for row in rows_of(tmp_path / "second") if not row["train/loss"]] == [
        at for at in silent if at >= step
    ]
