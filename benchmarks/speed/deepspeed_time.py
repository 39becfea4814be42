"""The time of a ZeRO-3 step on two CPU processes, over DeepSpeed's own engine loop.

Both train the same model on the same step batches with the same DeepSpeed settings, in blocks that alternate within the
same two processes; DeepSpeed clips by its own norm there. ``python -m benchmarks.speed.deepspeed_time``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.processes import run_group
from benchmarks.support import finish
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.loader import train_step_batches
from mgpu_pipe.data.text.prepare_text import PreparedData, prepare
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.optim.optimizers import optimizer_factory
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.topology import BatchPlan
from mgpu_pipe.training.deepspeed.deepspeed_config import deepspeed_config
from mgpu_pipe.training.deepspeed.zero_build import LossModule
from mgpu_pipe.training.train import train

WORLD, BLOCKS, STEPS, WARM_UP = 2, 9, 10, 3


def framework_block(config: RunConfig, prepared: PreparedData, folder: str) -> list[float]:
    paths = RunPaths(Path(folder))
    if dist.get_rank() == 0:
        paths.metrics.unlink(missing_ok=True)
        freeze(config, paths.config)
    dist.barrier()
    train(config, paths, prepared)
    return read_metrics(paths.metrics)["throughput/step_s"][WARM_UP:] if dist.get_rank() == 0 else []


def deepspeed_block(config: RunConfig, prepared: PreparedData) -> list[float]:
    import deepspeed

    plan = BatchPlan.resolve(config.data, WORLD)
    settings = {
        **deepspeed_config(config.strategy, config.precision, config.trainer, plan),
        "gradient_clipping": config.trainer.gradient_clip_val,
    }
    model = materialise(build_meta(config.model), config.seed, "cpu")
    build = optimizer_factory(config.optimizer, model)
    module = LossModule(CausalLMObjective(model, build, lambda step: 1.0, "auto"))
    engine, *_ = deepspeed.initialize(model=module, optimizer=build(model), config=settings)
    seconds: list[float] = []
    step_batches = train_step_batches(config, prepared, plan, dist.get_rank(), start_sample=0, max_steps=STEPS)
    mark = time.perf_counter()
    for step_batch in step_batches:
        total = torch.zeros(())
        for micro_batch in step_batch.micro_batches:
            loss = engine(micro_batch)
            engine.backward(loss * (WORLD / step_batch.loss_denominator), scale_wrt_gas=False)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        total.item()
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
    engine.destroy()
    return seconds[WARM_UP:]


def measured(folder: str) -> list[float]:
    """Median seconds of this project's steps, and of DeepSpeed's; on rank 0."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    config, _ = compose(
        [
            "model=llama_tiny",
            "strategy=zero3",
            f"trainer.devices={WORLD}",
            f"trainer.max_steps={STEPS}",
            "data.global_batch_size=16",
            "checkpoint=none",
            "data.validation_max_samples=8",
            "logger=none",
            "trainer.progress=off",
        ]
    )
    prepared = prepare(config)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(BLOCKS):
        ours += framework_block(config, prepared, folder)
        theirs += deepspeed_block(config, prepared)
    return [statistics.median(ours), statistics.median(theirs)] if dist.get_rank() == 0 else []


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (ours, theirs), *_ = run_group(WORLD, measured, folder)
    out = finish(
        "deepspeed_time",
        "ZeRO-3 step, two CPU processes, fp32: mgpu_pipe over DeepSpeed's own engine loop",
        ["model", "mgpu_pipe ms", "DeepSpeed ms", "ratio"],
        [["llama_tiny", ours * 1e3, theirs * 1e3, ours / theirs]],
        f"Medians of {BLOCKS * (STEPS - WARM_UP)} steps each, blocks alternating.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
