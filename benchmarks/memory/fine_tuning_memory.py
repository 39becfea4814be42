"""Memory of fine-tuning: adapters' gradients and optimizer over the closed form, and the heads of a distillation.

LoRA: the bytes of gradients and of AdamW's state that a run keeps, over 12 for each parameter of the adapters. QLoRA:
the bytes of weights that a run keeps, over half a byte, an eight-bit scale for 64 and a float for 256 scales of each
weight of the blocks' matrices, and 4 for each of all others. Heads: the most bytes alive at once in a loss of hidden
states and its backward pass, with a teacher's head over the student's
alone. ``python -m benchmarks.memory.fine_tuning_memory``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import finish
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.models.adapters.qlora import BLOCK, GROUP
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.shard_units import decoder_blocks
from mgpu_pipe.objectives.distill_keys import DistillConfig
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.cross_entropy import linear_cross_entropy
from mgpu_pipe.objectives.losses.divergence import Teaching, linear_distillation
from mgpu_pipe.parallel.device_memory import AllocationWatch
from mgpu_pipe.training.train import train

MODEL = "model=llama_small"
TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 2048, 256, 512, 32_768
KINDS = ("forward", "reverse", "jensen_shannon")
MB, GIB = 1e6, 1 << 30


def kept(*overrides: str) -> tuple[float, float, int]:
    """Bytes of gradients and optimizer that a run keeps, of weights, and how many parameters it trains."""
    sizes = ("trainer.max_steps=2", "data=synthetic", "data.validation_fraction=0", "data.global_batch_size=2")
    quiet = (MODEL, "checkpoint=none", "logger=none", "trainer.progress=off")
    config, _ = compose([*quiet, *sizes, *overrides])
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        summary = train(config, paths, prepare(config)).summary
    memory = summary["memory"]
    trains = (memory["gradients_gib"][0] + memory["optimizer_gib"][0]) * GIB
    return trains, memory["weights_gib"][0] * GIB, summary["model"]["trained"]


def four_bit_weights(trained: int) -> float:
    """Bytes of the model's weights with those of its blocks' matrices in four bits, and adapters of so many."""
    model = build_meta(compose([MODEL])[0].model)
    inside = {id(p) for block in decoder_blocks(model) for p in block.parameters() if p.dim() == 2}
    sizes = {True: 0, False: trained}
    for p in model.parameters():
        sizes[id(p) in inside] += p.numel()
    return sizes[True] * (1 / 2 + 1 / BLOCK + 4 / (BLOCK * GROUP)) + 4 * sizes[False]


def heads_peak(kind: str | None) -> int:
    """The most bytes alive in the student's loss; ``kind`` of divergence from a teacher, or None without one."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, requires_grad=True) for rows in (TOKENS, VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    taught, head = torch.randn(TOKENS, TEACHER_WIDTH), torch.randn(VOCABULARY, TEACHER_WIDTH)
    with AllocationWatch() as watch:
        if kind is None:
            loss = linear_cross_entropy(ChunkedHead(hidden, weight, None, labels))
        else:
            keys = DistillConfig(divergence=kind)  # type: ignore[arg-type]
            loss = linear_distillation(ChunkedHead(hidden, weight, None, labels), Teaching(keys, taught, head, None))
        loss.backward()
    return watch.peak


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[list[Any]] = []
    for name, overrides in (("all weights", ()), ("LoRA, rank 16", ("peft=lora",))):
        found, _, trained = kept(*overrides)
        ideal = 12 * trained
        rows.append([f"gradients and AdamW: {name}", found / MB, f"12 bytes x {trained:,}", ideal / MB, found / ideal])
    _, found, trained = kept("peft=qlora")
    wanted = four_bit_weights(trained)
    rows.append(["weights: QLoRA, rank 16", found / MB, "the closed form", wanted / MB, found / wanted])
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
