"""Memory of fine-tuning: adapters' gradients and optimizer over the closed form, and the heads of a distillation.

LoRA: the bytes of gradients and of AdamW's state that a run keeps, over 12 for each parameter of the adapters. Heads:
the most bytes alive at once in a loss of hidden states and its backward pass, with a teacher's head over the student's
alone. ``python -m benchmarks.fine_tuning_memory``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import finish
from mgpu_pipe.config.compose import compose
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.data.prepare import prepare
from mgpu_pipe.objectives.cross_entropy import linear_cross_entropy
from mgpu_pipe.objectives.distill_keys import DistillConfig
from mgpu_pipe.objectives.divergence import Teaching, linear_distillation
from mgpu_pipe.parallel.memory import AllocationWatch
from mgpu_pipe.training.run import train

TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 2048, 256, 512, 32_768
KINDS = ("forward", "reverse", "jensen_shannon")
MB, GIB = 1e6, 1 << 30


def kept(*overrides: str) -> tuple[float, int]:
    """Bytes of gradients and optimizer that a run keeps, and how many parameters it trains."""
    sizes = ("trainer.max_steps=2", "data=synthetic", "data.validation_fraction=0", "data.global_batch_size=2")
    quiet = ("model=llama_small", "checkpoint=none", "logger=none", "trainer.progress=off")
    config, _ = compose([*quiet, *sizes, *overrides])
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        summary = train(config, paths, prepare(config)).summary
    memory = summary["memory"]
    return (memory["gradients_gib"][0] + memory["optimizer_gib"][0]) * GIB, summary["model"]["trained"]


def heads_peak(kind: str | None) -> int:
    """The most bytes alive in the student's loss; ``kind`` of divergence from a teacher, or None without one."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, requires_grad=True) for rows in (TOKENS, VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    taught, head = torch.randn(TOKENS, TEACHER_WIDTH), torch.randn(VOCABULARY, TEACHER_WIDTH)
    with AllocationWatch() as watch:
        if kind is None:
            loss = linear_cross_entropy(hidden, weight, None, labels)
        else:
            keys = DistillConfig(divergence=kind)  # type: ignore[arg-type]
            loss = linear_distillation(hidden, weight, None, labels, "auto", Teaching(keys, taught, head, None))
        loss.backward()
    return watch.peak


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[list[Any]] = []
    for name, overrides in (("all weights", ()), ("LoRA, rank 16", ("peft=lora",))):
        found, trained = kept(*overrides)
        ideal = 12 * trained
        rows.append([f"gradients and AdamW: {name}", found / MB, f"12 bytes x {trained:,}", ideal / MB, found / ideal])
    alone = heads_peak(None)
    for kind in KINDS:
        peak = heads_peak(kind)
        rows.append([f"heads: {kind}", peak / MB, "the student's alone", alone / MB, peak / alone])
    out = finish(
        "fine_tuning_memory",
        "Memory of adapters and of the heads of a distillation, one process, fp32",
        ["what", "MB", "over", "its MB", "ratio"],
        rows,
        f"Adapters of llama_small; heads of {TOKENS} tokens, {VOCABULARY:,} words, widths {WIDTH} and {TEACHER_WIDTH}.",
    )
    dist.destroy_process_group()
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
