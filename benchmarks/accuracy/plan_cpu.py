"""Seconds a step of layouts of two and four CPU processes, beside the planner's prediction after ``calibrate``.

Each world is calibrated with as many processes as it has, just before its layouts run. Measured steps are the median of
those after the warm-up. The chosen layout's regret is its seconds over the fastest ones.
``python -m benchmarks.accuracy.plan_cpu``.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import run_group
from benchmarks.support import finish

STEPS, WARM_UP = 7, 2
MODEL = [
    *("model=llama_tiny", "model.config.hidden_size=128", "model.config.intermediate_size=384"),
    *("model.config.head_dim=16", "model.config.num_key_value_heads=8", "data.seq_len=128"),
    *("data=synthetic", "data.global_batch_size=16", "precision=fp32", "trainer.accelerator=cpu"),
]
QUIET = ["data.validation_fraction=0", "checkpoint=none", "logger=none", "trainer.progress=off", "scheduler=constant"]
MEGATRON = "strategy=megatron"
LAYOUTS: dict[int, list[list[str]]] = {
    2: [
        ["strategy=ddp", "data.micro_batch_size=8"],
        ["strategy=ddp", "data.micro_batch_size=2"],
        ["strategy=ddp", "data.micro_batch_size=8", "strategy.activation_checkpointing=full"],
        ["strategy=fsdp", "data.micro_batch_size=8"],
        ["strategy=fsdp", "data.micro_batch_size=2"],
        [MEGATRON, "strategy.tp=2", "data.micro_batch_size=16"],
        [MEGATRON, "strategy.tp=2", "data.micro_batch_size=4"],
        [MEGATRON, "strategy.pp=2", "strategy.pipeline.schedule=1f1b", "data.micro_batch_size=4"],
        [MEGATRON, "strategy.pp=2", "strategy.pipeline.schedule=1f1b", "data.micro_batch_size=1"],
        [MEGATRON, "strategy.cp=2", "data.micro_batch_size=8"],
    ],
    4: [
        ["strategy=ddp", "data.micro_batch_size=4"],
        ["strategy=fsdp", "data.micro_batch_size=4"],
        ["strategy=hsdp", "strategy.dp_replicate=2", "data.micro_batch_size=4"],
        [MEGATRON, "strategy.tp=2", "strategy.dp_replicate=2", "data.micro_batch_size=8"],
        [MEGATRON, "strategy.tp=4", "data.micro_batch_size=16"],
        [MEGATRON, "strategy.pp=2", "strategy.dp_replicate=2", "data.micro_batch_size=2"],
        [MEGATRON, "strategy.pp=4", "data.micro_batch_size=2"],
        [MEGATRON, "strategy.tp=2", "strategy.pp=2", "data.micro_batch_size=4"],
        [MEGATRON, "strategy.cp=2", "strategy.dp_replicate=2", "data.micro_batch_size=8"],
        [MEGATRON, "strategy.cp=2", "strategy.tp=2", "data.micro_batch_size=8"],
    ],
}


def configured(world: int, layout: list[str], more: list[str]) -> Any:
    from mgpu_pipe.config.hydra.compose import compose

    return compose([*MODEL, *QUIET, f"trainer.devices={world}", f"trainer.max_steps={STEPS}", *layout, *more])[0]


def measured_steps(world: int) -> tuple[str, list[float]]:
    """The calibrated profile, and the median step of every layout of a world; on rank 0."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.data.text.prepare_text import prepare
    from mgpu_pipe.planning.calibration import profile_text
    from mgpu_pipe.runs.metrics_file import read_metrics
    from mgpu_pipe.training.profiling.measure_hardware import measure_hardware
    from mgpu_pipe.training.train import train

    profile = profile_text(measure_hardware(torch.device("cpu")))
    medians = []
    for layout in LAYOUTS[world]:
        config = configured(world, layout, [])
        dist.barrier()
        with tempfile.TemporaryDirectory() as folder:
            paths = RunPaths(Path(folder))
            freeze(config, paths.config)
            train(config, paths, prepare(config))
            seconds = read_metrics(paths.metrics).get("throughput/step_s", []) if dist.get_rank() == 0 else []
        medians.append(statistics.median(seconds[WARM_UP:] or [0.0]))
        if dist.get_rank() == 0:
            print(world, layout, medians[-1], flush=True)
    return profile, medians


def main() -> None:
    from mgpu_pipe.planning.run_hardware import predicted_seconds

    rows: list[list[Any]] = []
    regrets = []
    for world, layouts in LAYOUTS.items():
        profile, seconds = run_group(world, measured_steps, world)[0]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "calibrated.yaml"
            file.write_text(profile)
            predicted = [
                predicted_seconds(configured(world, layout, [f"plan.hardware=[{file}]"]))[0] for layout in layouts
            ]
        print(profile)
        for layout, took, time in zip(layouts, seconds, predicted, strict=True):
            rows.append([world, " ".join(layout), took, time, 100 * (time / took - 1)])
        regrets.append(100 * (seconds[int(np.argmin(predicted))] / min(seconds) - 1))
    error = float(np.mean([abs(row[-1]) for row in rows]))
    notes = (
        f"Mean absolute error {error:.1f}% (asked: 15), regret of the chosen layout "
        f"{', '.join(f'{each:.1f}%' for each in regrets)} on 2 and 4 processes (asked: 5). "
        "The machine has two cores and ran nothing else."
    )
    finish("plan_cpu", "Seconds a step of CPU processes, predicted after calibrate", COLUMNS, rows, notes)


COLUMNS = ("processes", "layout", "measured, s", "predicted, s", "error, %")

if __name__ == "__main__":
    main()
