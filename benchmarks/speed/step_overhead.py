"""The framework's own time a step, on a toy model of two linear layers: what a step takes over plain torch.

Its peers are Lightning's manual optimisation with nothing else (no bar, no logger), and Lightning's automatic
optimisation with its progress bar and CSV logger, as the framework has them. ``python -m
benchmarks.speed.step_overhead``.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger

from benchmarks.support import finish
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig, TrainerConfig
from mgpu_pipe.data.step_batch import BatchSpec, Field, StepBatch
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.runs.metrics_file import MetricsWriter
from mgpu_pipe.system.compat.lightning_private import NEVER, quiet_signals
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.mesh import MeshStrategy
from mgpu_pipe.training.progress import Progress
from mgpu_pipe.training.recorder import StepRecorder
from mgpu_pipe.training.save_and_resume import Checkpointer

STEPS, BLOCKS = 1000, 5
EMPTY, FULL = "Lightning manual, no bar, no logger", "Lightning automatic, bar and CSV"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "max_steps": STEPS,
}


def toy() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class Batches:
    """The same batch ``STEPS`` times, as a step batch or bare."""

    def __init__(self, step_batches: bool) -> None:
        self.step_batches = step_batches

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        x = torch.randn(8, 32)
        for step in range(STEPS):
            yield StepBatch(step, step * 8, 8, [{"x": x}], 8) if self.step_batches else x


class ToyObjective(Objective):
    @property
    def batch_spec(self) -> BatchSpec:
        return BatchSpec({"x": Field(sequence_dim=None, dtype="float32", shape=(32,))})

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.model(batch["x"]).square().sum()


class ToyModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = toy()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(batch).square().sum() / 8
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)


class ManualModule(pl.LightningModule):
    """A loop by hand, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = toy()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.model(batch).square().sum() / 8
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)


class Clock(pl.Callback):
    """Time from step 100 to the last."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 100:
            self.started = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = (time.perf_counter() - self.started) / (STEPS - 100)


def plain() -> float:
    model = toy()
    optimizer = adamw(model)
    started = 0.0
    for step, x in enumerate(Batches(step_batches=False)):
        if step == 100:
            started = time.perf_counter()
        loss = model(x).square().sum() / 8
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - started) / (STEPS - 100)


def manual() -> float:
    clock = Clock()
    trainer = pl.Trainer(**QUIET, logger=False, callbacks=[clock], enable_progress_bar=False)
    trainer.fit(ManualModule(), Batches(step_batches=False))
    return clock.seconds


def lightning(folder: Path) -> float:
    clock = Clock()
    bar = TQDMProgressBar()
    trainer = pl.Trainer(
        **QUIET, logger=CSVLogger(folder), callbacks=[clock, bar], gradient_clip_val=1.0, log_every_n_steps=1
    )
    trainer.fit(ToyModule(), Batches(step_batches=False))
    return clock.seconds


def framework(folder: Path) -> float:
    clock = Clock()
    strategy = MeshStrategy(ParallelDims(), torch.device("cpu"), max_norm=1.0)
    paths = RunPaths(folder)
    recorder = StepRecorder(
        TrainerConfig(),
        max_steps=STEPS + 1,
        start_step=0,
        save_last=False,
        checkpointer=Checkpointer(CheckpointConfig(), paths, {"global_batch_size": 8}),
        writer=MetricsWriter(paths.metrics),
        progress=Progress(STEPS, "bar", stream=io.StringIO(), run_name="toy"),
    )
    trainer = pl.Trainer(
        **QUIET,
        strategy=strategy,
        devices=1,
        logger=False,
        callbacks=[clock, recorder],
        enable_progress_bar=False,
        val_check_interval=NEVER,
        check_val_every_n_epoch=None,
    )
    quiet_signals(trainer)
    trainer.fit(ToyObjective(toy(), adamw, lambda step: 1.0), Batches(step_batches=True))
    return clock.seconds


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    times: dict[str, list[float]] = {name: [] for name in ("plain torch", EMPTY, FULL, "mgpu_pipe")}
    # The bars are drawn, but into a file: a terminal's own speed is not what is measured.
    for _ in range(BLOCKS):
        with (
            Path(os.devnull).open("w") as sink,
            contextlib.redirect_stderr(sink),
            contextlib.redirect_stdout(sink),
            tempfile.TemporaryDirectory() as folder,
        ):
            times["plain torch"].append(plain())
            times[EMPTY].append(manual())
            times[FULL].append(lightning(Path(folder) / "lightning"))
            (Path(folder) / "ours").mkdir()
            times["mgpu_pipe"].append(framework(Path(folder) / "ours"))
    base = statistics.median(times["plain torch"])
    empty = statistics.median(times[EMPTY])
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        rows.append([name, median * 1e6, (median - base) * 1e6, median / empty])
    finish(
        "step_overhead",
        "Own time a step, toy model of two linear layers",
        ["loop", "us a step", "us over plain torch", "over Lightning's empty loop"],
        rows,
        f"Medians of {BLOCKS} blocks of {STEPS - 100} steps; one thread; mgpu_pipe with CSV row and bar every step.",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
