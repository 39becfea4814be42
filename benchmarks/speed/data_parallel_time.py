"""Step time of data parallelism on two CPU processes, over hand-written torch loops.

``ddp`` against ``torch.nn.parallel.DistributedDataParallel``, ``fsdp`` against ``fully_shard`` on each block, with the
same model, step batches and optimizer, in blocks that alternate within the same processes; this project's with its CSV
on. ``python -m benchmarks.speed.data_parallel_time``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

BLOCKS, STEPS, WARM_UP = 4, 12, 3
WORLD = 2
MODEL, BATCH = "llama_small", 8


def configured(strategy: str) -> Any:
    from mgpu_pipe.config.hydra.compose import compose

    config, _ = compose(
        [
            f"model={MODEL}",
            f"strategy={strategy}",
            f"trainer.devices={WORLD}",
            f"trainer.max_steps={STEPS}",
            f"data.global_batch_size={BATCH}",
            "data.validation_fraction=0",
            "checkpoint=none",
            "logger=none",
            "trainer.progress=off",
        ]
    )
    return config


Block = Callable[[Any, Any, str], list[float]]
"""Trains a configuration on prepared data by a strategy; seconds of every step after the warm-up."""


def blocks(strategy: str, peer: Block) -> dict[str, list[float]]:
    """Seconds of every step after the warm-up, of both."""
    import torch.distributed as dist

    from mgpu_pipe.data.text.prepare_text import prepare

    config = configured(strategy)
    prepared = prepare(config)
    found: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(BLOCKS):
        dist.barrier()
        found["peer"] += peer(config, prepared, strategy)
        dist.barrier()
        found["ours"] += own_block(config, prepared)
    return found


def own_block(config: Any, prepared: Any) -> list[float]:
    import torch.distributed as dist

    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.runs.metrics_file import read_metrics
    from mgpu_pipe.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        train(config, paths, prepared)
        return read_metrics(paths.metrics)["throughput/step_s"][WARM_UP:] if dist.get_rank() == 0 else []


def plain_block(config: Any, prepared: Any, strategy: str) -> list[float]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from mgpu_pipe.data.loader import train_step_batches
    from mgpu_pipe.models.build import build_meta, materialise
    from mgpu_pipe.topology import BatchPlan

    model: Any = materialise(build_meta(config.model), config.seed, "cpu")
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        wrapped: Any = model
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=config.optimizer.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    seconds = []
    plan = BatchPlan.resolve(config.data, WORLD)
    step_batches = train_step_batches(config, prepared, plan, dist.get_rank(), start_sample=0, max_steps=STEPS)
    mark = time.perf_counter()
    for step_batch in step_batches:
        total = torch.zeros(())
        for batch in step_batch.micro_batches:
            logits = wrapped(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            (loss * WORLD / step_batch.loss_denominator).backward()
            total += loss.detach()
        dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=strategy == "fsdp")
        float(total)
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
    return seconds[WARM_UP:]


def compare(name: str, title: str, peer: Block, names: dict[str, str]) -> None:
    """Measure the strategies against ``peer`` and write the result.

    Args:
        names: of the peer, for each strategy.
    """
    from mgpu_pipe.data.text.prepare_text import prepare

    rows = []
    for strategy in names:
        prepare(configured(strategy))  # by a worker pool, which the processes of a group cannot start
        found = run_group(WORLD, blocks, strategy, peer)[0]
        ours, theirs = statistics.median(found["ours"]), statistics.median(found["peer"])
        rows.append([strategy, names[strategy], ours * 1e3, theirs * 1e3, ours / theirs])
    out = finish(
        name,
        title,
        ["strategy", "peer", "mgpu_pipe ms", "peer ms", "ratio"],
        rows,
        f"{MODEL}, {BATCH} samples of 256 tokens a step, fp32, one thread a process; medians of "
        f"{BLOCKS * (STEPS - WARM_UP)} steps each, blocks alternating.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    compare(
        "data_parallel_time",
        "Step time on two CPU processes, over a hand-written loop",
        plain_block,
        {"ddp": "DistributedDataParallel", "fsdp": "fully_shard"},
    )
