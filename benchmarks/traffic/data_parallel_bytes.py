"""Bytes that each process keeps, and sends in a step, over the closed forms of data parallelism.

``llama_small`` trains for two steps of two micro-batches on groups of 2, 4 and 8 CPU processes through the product's
own ``train``. Kept are weights, gradients and AdamW's state; the closed forms are
:func:`mgpu_pipe.architectures.formulas.kept_memory.state_bytes` and
:func:`benchmarks.traffic.closed_forms.state_traffic`. Under fsdp less is
sent: a plan keeps the last unit gathered and never gathers a lookup for the backward pass.
``python -m benchmarks.traffic.data_parallel_bytes [sizes]``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish
from benchmarks.traffic.closed_forms import state_traffic
from mgpu_pipe.architectures.formulas.kept_memory import state_bytes

MICRO_BATCHES = 2
CASES = (("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16"), ("fsdp", "bf16_true"), ("hsdp", "fp32"))
GIB = 1 << 30


def measure(cases: list[tuple[str, str]], *overrides: str) -> list[dict[str, Any]]:
    """Bytes kept and sent by this process for each (strategy, precision); ``overrides`` come last."""
    import torch.distributed as dist

    from benchmarks.traffic.collectives import CollectiveCounter
    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.hydra.compose import compose
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.data.text.prepare_text import prepare
    from mgpu_pipe.training.train import train

    world, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for strategy, precision in cases:
        config, _ = compose(
            [
                "model=llama_small",
                f"strategy={strategy}",
                f"trainer.devices={world}",
                "trainer.max_steps=2",
                *(["strategy.dp_replicate=2"] if strategy == "hsdp" else []),
                f"precision={precision}",
                "data=synthetic",
                "data.seq_len=32",
                f"data.global_batch_size={MICRO_BATCHES * world}",
                "data.micro_batch_size=1",
                "data.validation_fraction=0",
                "checkpoint=none",
                "logger=none",
                "trainer.progress=off",
                "+callbacks.count._target_=benchmarks.traffic.collectives.CollectiveCounter",
                *overrides,
            ]
        )
        prepared = prepare(config)
        with tempfile.TemporaryDirectory() as folder:
            paths = RunPaths(Path(folder))
            freeze(config, paths.config)
            result = train(config, paths, prepared)
        memory = result.summary["memory"]
        kept = sum(memory[f"{part}_gib"][rank] for part in ("weights", "gradients", "optimizer")) * GIB
        counted = CollectiveCounter.last
        found.append(
            {
                "kept": kept,
                "parameters": result.summary["model"]["parameters"],
                "sent": dict(counted.sent),
                "calls": dict(counted.calls),
            }
        )
    return found


def closed_forms(strategy: str, precision: str, world: int, parameters: int) -> tuple[float, float]:
    """Bytes kept by a process, and sent by it in a step."""
    replicas, shards = {"ddp": (world, 1), "fsdp": (1, world), "hsdp": (2, world // 2)}[strategy]
    number = 2 if precision == "bf16_true" else 4  # bytes of whatever is kept
    kept = state_bytes(number * parameters, parameters, shards, gradient=number, optimizer=2 * number).total
    gathered = 4 if precision == "fp32" else 2
    return kept, state_traffic(parameters, gathered, shards, replicas, micro_batches=MICRO_BATCHES)


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:]] or [2, 4, 8]
    rows = []
    for world in sizes:
        cases = [case for case in CASES if case[0] != "hsdp" or world >= 4]
        by_rank = run_group(world, measure, cases)
        for number, (strategy, precision) in enumerate(cases):
            ranks = [found[number] for found in by_rank]
            kept = max(rank["kept"] for rank in ranks)
            sent = max(sum(rank["sent"].values()) for rank in ranks)
            ideal_kept, ideal_sent = closed_forms(strategy, precision, world, ranks[0]["parameters"])
            calls = ", ".join(
                f"{count} x {name} ({ranks[0]['sent'][name] / 1e6:.3g} MB)" for name, count in ranks[0]["calls"].items()
            )
            ratios = [kept / 1e6, kept / ideal_kept, sent / 1e6, sent / ideal_sent]
            rows.append([world, strategy, precision, *ratios, calls])
    out = finish(
        "data_parallel_bytes",
        "Bytes a process keeps and sends in a step, over the closed form",
        ["processes", "strategy", "precision", "kept MB", "kept ratio", "sent MB", "sent ratio", "collectives"],
        rows,
        f"llama_small, {MICRO_BATCHES} micro-batches a step; kept: weights, gradients, AdamW state; the worst process.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
