"""The run that runs under other strategies are compared with."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.checkpoint.selection import list_steps
from tests.support.command import column

BASE = (
    *("model=llama_tiny", "data=text_files", "precision=fp32", "optimizer.lr=3e-4", "data.seq_len=64"),
    *("data.validation_max_samples=21", "data.global_batch_size=24", "trainer.val_every_n_steps=10"),
    *("trainer.max_steps=20", "scheduler.warmup_steps=2", "logger=none", "objective.sample_prompts=['def ']"),
    "objective.sample_max_new_tokens=8",
)
SHORT = (
    *("model=llama_tiny", "data=synthetic", "data.seq_len=32", "data.global_batch_size=8"),
    *("data.synthetic.num_documents=100", "logger=none"),
)
"""Words of a run whose steps take milliseconds."""
MEASURED = ("train/loss", "train/grad_norm", "val/loss")


def overrides(corpus: Path, *more: str) -> list[str]:
    return [*BASE, f"data.paths=[{corpus}/*.txt]", *more]


def steps_of(folder: Path) -> list[int]:
    """The steps of a run whose checkpoints are whole."""
    return [info.step for info in list_steps(folder / "checkpoints", "full") if info.whole]


def same(folder: Path, other: Path, first: int = 1) -> None:
    for name in MEASURED:
        mine, truth = column(folder, name), column(other, name)
        steps = [step for step in truth if step >= first]
        assert steps
        assert max(abs(mine[step] / truth[step] - 1) for step in steps) <= 1e-5, name
