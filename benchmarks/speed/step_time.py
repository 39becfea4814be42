"""The time of a training step of ``llama_small`` in one process, over a hand-written torch loop.

Both train the same model on the same step batches with the same optimizer, in blocks that alternate within one process;
this project's has its CSV, TensorBoard and progress on. ``python -m benchmarks.speed.step_time``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.support import finish
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.loader import train_step_batches
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.topology import BatchPlan
from mgpu_pipe.training.train import train

BLOCKS, STEPS, WARM_UP = 3, 14, 3


def framework_block(config: RunConfig, prepared: object) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        train(config, paths, prepared)  # type: ignore[arg-type]
        return read_metrics(paths.metrics)["throughput/step_s"][WARM_UP:]


def plain_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def plain_block(
    config: RunConfig,
    prepared: object,
    adapted: Callable[[Any], Any] = lambda model: model,
    losses: Callable[[Any, Mapping[str, torch.Tensor]], Sequence[Callable[[], torch.Tensor]]] = (
        lambda model, batch: [partial(plain_loss, model, batch)]
    ),
) -> list[float]:
    """Seconds of each step of a loop by hand.

    Args:
        adapted: what is trained of the drawn model.
        losses: of a micro-batch, one after another, each with a backward pass of its own.
    """
    model = build_meta(config.model)
    materialise(model, config.seed, "cpu")
    model = adapted(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    rest = [p for p in trained if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=config.optimizer.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    seconds = []
    plan = BatchPlan.resolve(config.data, 1)
    steps = config.trainer.max_steps
    step_batches = train_step_batches(config, prepared, plan, 0, start_sample=0, max_steps=steps)  # type: ignore[arg-type]
    mark = time.perf_counter()
    for step_batch in step_batches:
        total = 0.0
        for batch in step_batch.micro_batches:
            for loss in losses(model, batch):
                found = loss()
                (found / step_batch.loss_denominator).backward()
                total += found.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
    return seconds[WARM_UP:]


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for model_name, batch in (("llama_small", 8), ("llama_tiny", 8)):
        config, _ = compose(
            [
                f"model={model_name}",
                f"trainer.max_steps={STEPS}",
                f"data.global_batch_size={batch}",
                "checkpoint=none",
                "data.validation_max_samples=8",
            ]
        )
        prepared = prepare(config)
        ours: list[float] = []
        plain: list[float] = []
        for _ in range(BLOCKS):
            plain += plain_block(config, prepared)
            ours += framework_block(config, prepared)
        a, b = statistics.median(ours), statistics.median(plain)
        rows.append([model_name, f"{batch} x {config.data.seq_len}", a * 1e3, b * 1e3, a / b])
    out = finish(
        "step_time",
        "Training step, one process, fp32: mgpu_pipe over a hand-written torch loop",
        ["model", "batch", "mgpu_pipe ms", "plain torch ms", "ratio"],
        rows,
        f"Medians of {BLOCKS * (STEPS - WARM_UP)} steps each, blocks alternating; CSV, TensorBoard and progress on.",
    )
    dist.destroy_process_group()
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
