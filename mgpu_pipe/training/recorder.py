"""The callback that closes every optimizer step: its row of metrics, loggers, progress, checkpoint, and stop.

It closes a step after its evaluation, if there is one, so that the file has the whole row before the step's
checkpoint starts. The save flushes the file to the disk before the manifest.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytorch_lightning as pl
import torch

from mgpu_pipe.config.objective import TRAINING_METRICS
from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import StepResult
from mgpu_pipe.runs.metrics_file import MetricsWriter
from mgpu_pipe.system.compat.lightning_private import evaluate_after_this_step, start_at_step, stop_after_this_step
from mgpu_pipe.training.initial_weights import StartWeights
from mgpu_pipe.training.loggers import log_metrics, log_samples
from mgpu_pipe.training.progress import Progress
from mgpu_pipe.training.run_clock import StepClock
from mgpu_pipe.training.save_and_resume import Checkpointer

GIB = 1 << 30
TOKENS = "tokens/"
"""Prefix of the metric that counts a source's tokens since the run's first step."""
WARM_UP_STEPS = 2
"""Steps whose time does not count in the run's throughput: allocator, kernels and caches warm up."""


def peak_memory_gib(device: torch.device) -> float:
    """Peak of allocated device memory on CUDA, of the resident set of the process on CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


class StepRecorder(pl.Callback):
    """Lightning callback that records the metrics of every step and starts evaluation, saves and samples.

    Args:
        max_steps: the run's last (one-based) step.
        start_step: steps done before this attempt.
        save_last: whether to save the last step.
        writer, progress: on rank 0 only, None elsewhere.
        own_writer: writes this rank's own file, where there are several ranks.
        ranked: metrics that a step's checkpoint keeps.
        model_flops_utilisation: computes MFU from tokens/s; None where the device's peak is not known.
        tasks: measures the tasks at every evaluation, on every rank; returns their metrics.
        sample: called after each closed step, on every rank; its time is not the step's.
        weights: the weights to load before the first step.
        source_tokens: counts a mixture's tokens by source, from a step's first sample and the number of its samples.
        before_first_step: called before the first step.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        max_steps: int,
        start_step: int,
        checkpointer: Checkpointer,
        save_last: bool,
        writer: MetricsWriter | None,
        progress: Progress | None,
        own_writer: MetricsWriter | None = None,
        ranked: Sequence[str] = TRAINING_METRICS,
        model_flops_utilisation: Any = None,
        tasks: Callable[[], dict[str, float]] | None = None,
        sample: Callable[[int], list[dict[str, str]]] | None = None,
        weights: StartWeights | None = None,
        source_tokens: Callable[[int, int], dict[str, int]] | None = None,
        before_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self.max_steps = max_steps
        self._start_step = start_step
        self._checkpointer = checkpointer
        self._save_last = save_last
        self._writer = writer
        self._own_writer = own_writer
        self._progress = progress
        self._ranked = ranked
        self._mfu = model_flops_utilisation
        self._tasks, self._sample = tasks, sample
        self._before_first_step = before_first_step
        self._save_due = False
        self._weights = weights or StartWeights()
        self._source_tokens = source_tokens
        resumed = self._weights.resumed
        before = resumed.state["metrics"] if resumed is not None else {}
        self._consumed = {key: int(value) for key, value in before.items() if key.startswith(TOKENS)}
        """Tokens of each source of a mixture since the run's first step, by metric."""
        self._open: dict[str, Any] | None = None
        self._evaluating = ExitStack()
        self._clock = StepClock()
        self._cpu_seconds = 0.0
        """Processor time of this process in the latest step."""
        self.step = start_step
        self.stopped = False
        self.metrics: dict[str, float] = {}
        """The latest value of each metric."""
        self._measured: dict[str, float] = {}
        """Metrics of the latest step alone, which its checkpoint stores and is ranked by."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        objective: Any = pl_module
        self._weights.load(trainer.strategy, objective.model)
        start_at_step(trainer, self._start_step)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._progress is not None:
            self._progress.start(self._start_step)
        self._before_first_step()
        self._clock.start_step()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        self._clock.receive_batch()
        evaluate_after_this_step(trainer, self._evaluation_due(batch.step + 1))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        seconds, cpu_seconds = self._clock.end_step()
        result: StepResult = outputs["result"]
        if result.stop:
            self.stopped = True
            stop_after_this_step(trainer)
        if result.abandoned:
            return
        self.step, self._cpu_seconds, self._save_due = batch.step + 1, cpu_seconds, result.save
        if math.isfinite(result.loss) and math.isfinite(result.gradient_norm):  # fp16 skips a step that is not
            self._checkpointer.step_was_finite(self.step)
        if self.step > self._start_step + WARM_UP_STEPS:
            self._clock.count(batch, seconds, cpu_seconds)
        self._open = {
            "step": self.step,
            **({} if batch.loss_denominator == 0 else {"train/loss": result.loss}),
            "train/grad_norm": result.gradient_norm,
            "lr": outputs["lr"],
            "throughput/tokens_per_s": batch.num_tokens / seconds,
            "throughput/samples_per_s": batch.num_samples / seconds,
            "throughput/padding": batch.padding / max(batch.num_tokens, 1),
            "throughput/step_s": seconds,
            **self._count_sources(batch),
            **({"train/skipped": 1} if result.skipped and math.isfinite(result.gradient_norm) else {}),
        }
        if result.stop or not self._evaluation_due(self.step):
            self._close_step(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._evaluating.enter_context(trainer.strategy.evaluated_weights())  # type: ignore[attr-defined]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._evaluating.close()
        evaluated = dict(pl_module.evaluated)
        self.metrics.update(evaluated)
        if self._open is not None:
            self._open.update(evaluated)
            self._close_step(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._open is not None:
            self._close_step(trainer)
        unsaved = self._checkpointer.last_step != self.step and self.step > self._start_step
        if unsaved and (self._save_last or self.stopped):
            self._save(trainer, last=True)
        self._checkpointer.finish(self.step)
        if self._progress is not None:
            self._progress.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._checkpointer.let_finish()
        if self._progress is not None:
            self._progress.close()

    def throughput(self) -> dict[str, float]:
        """See :meth:`StepClock.throughput`; with the model FLOPs utilisation where the device's peak is known."""
        rates = self._clock.throughput()
        if rates and self._mfu is not None:
            rates["throughput/mfu"] = self._mfu(rates["throughput/tokens_per_s"])
        return rates

    def times(self) -> dict[str, float]:
        """See :meth:`StepClock.times`."""
        return self._clock.times()

    def _count_sources(self, batch: StepBatch) -> dict[str, int]:
        """Tokens of each source of a mixture so far, including this step."""
        if self._source_tokens is not None:
            for name, tokens in self._source_tokens(batch.first_sample, batch.num_samples).items():
                self._consumed[TOKENS + name] = self._consumed.get(TOKENS + name, 0) + tokens
        return dict(self._consumed)

    def _evaluation_due(self, step: int) -> bool:
        every = self._config.val_every_n_steps
        return step == self.max_steps or (every is not None and step % every == 0)

    def _close_step(self, trainer: pl.Trainer) -> None:
        """Complete the row of the open step, then log, save and sample where due."""
        assert self._open is not None
        row, self._open = self._open, None
        is_evaluated = self._evaluation_due(self.step) and not self.stopped
        if is_evaluated and self._tasks is not None:
            with trainer.strategy.evaluated_weights():  # type: ignore[attr-defined]
                row.update(self._tasks())
        self._measured = {key: row[key] for key in (*self._ranked, *self._consumed) if key in row}
        self.metrics.update(self._measured)
        if is_evaluated or self.step == self.max_steps or self.step % self._config.log_every_n_steps == 0:
            self._log(trainer, row)
        if self._progress is not None:
            self._progress.update(
                self.step,
                row.get("train/loss", math.nan),
                row["throughput/tokens_per_s"],
                row["throughput/samples_per_s"],
                lr=row["lr"],
                val_loss=row.get("val/loss"),
            )
        if self._save_due or self._checkpointer.due(self.step):
            self._save(trainer)
        elif self.step == self._start_step + 1:
            self._checkpointer.reserve(trainer.strategy, self.step)  # type: ignore[arg-type]
        if self._sample is not None and not self.stopped:
            log_samples(trainer.loggers, self.step, self._sample(self.step))
        self._clock.start_step()  # evaluation, saving and sampling are not the step's time

    def _log(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        """Write the row to this rank's files and loggers, with what only logged steps measure. A collective call."""
        row.update(trainer.strategy.step_metrics())  # type: ignore[attr-defined]
        if self._writer is None and self._own_writer is None and not trainer.loggers:
            return
        peak = row["memory/peak_gib"] = peak_memory_gib(trainer.strategy.root_device)
        if self._own_writer is not None:
            times = {"data_s": self._clock.waited, "cpu_s": self._cpu_seconds}
            self._own_writer.append({"step": self.step, **times, "peak_gib": peak})
        if self._mfu is not None:
            row["throughput/mfu"] = self._mfu(row["throughput/tokens_per_s"])
        if self._writer is not None:
            self._writer.widen(list(row))
            self._writer.append(row)
        values = {key: value for key, value in row.items() if key != "step"}
        for logger in trainer.loggers:
            log_metrics(logger, values, self.step)

    def _save(self, trainer: pl.Trainer, last: bool = False) -> None:
        self._checkpointer.save(trainer.strategy, self.step, self._measured, last=last)  # type: ignore[arg-type]
