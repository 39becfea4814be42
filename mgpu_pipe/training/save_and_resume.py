"""Saves a run's checkpoints with their state, and restores weights and optimizer from one."""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.background import BackgroundSaver
from mgpu_pipe.checkpoint.left_out import LeftOut
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import NotFinite, Plan, Planner, write
from mgpu_pipe.checkpoint.save_plan import RankShards
from mgpu_pipe.checkpoint.selection import best, list_steps, mark_ruined, newest_valid, prune, ruined_steps
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.errors import CheckpointSaveError, NonFiniteError
from mgpu_pipe.optim.moving_average import EMA
from mgpu_pipe.system.local_files import fix_of_writing
from mgpu_pipe.training.run_clock import RunClock

_log = logging.getLogger(__name__)


class HoldsState(Protocol):
    """The part of a strategy that saving needs."""

    def model_shards(self) -> list[LocalShard]: ...

    def optimizer_shards(self) -> list[LocalShard]: ...

    def state_entries(self) -> dict[str, Any]: ...
    def shards_written(self) -> None: ...


class Checkpointer:
    """Saves a run's checkpoints and prunes old ones. Methods are collective calls unless they say otherwise.

    Args:
        fixed_state: entries of ``state.json`` that are the same at every step (topology, seed, horizon, ...).
        timeout_s: seconds after which a rank that does not come to a save's next part fails the save.
        patience_s: seconds that a save gets to be committed when training has failed.
        left_out: the frozen weights that are not saved.
        start_step: the step that the attempt resumes from.
        clock: the run's; notified of every save.
        before_manifest: brings to the disk what must be there before a checkpoint is; called on rank 0, perhaps by
            another thread.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        paths: RunPaths,
        fixed_state: dict[str, Any],
        *,
        timeout_s: float = 600.0,
        patience_s: float = 60.0,
        start_step: int = 0,
        before_manifest: Callable[[], None] = lambda: None,
        clock: RunClock | None = None,
        highest: bool = False,
        left_out: LeftOut | None = None,
    ) -> None:
        self._left_out = set(left_out.names) if left_out is not None else set()
        if left_out is not None:
            fixed_state = {**fixed_state, **left_out.as_state()}
        self._highest = highest
        self._config, self._paths, self._fixed_state = config, paths, fixed_state
        self._before_manifest, self._patience_s = before_manifest, patience_s
        self._clock = clock or RunClock()
        # The run's last save has no training to overlap with.
        overlaps = config.async_save and config.saves_on_the_way()
        self._background = BackgroundSaver(timeout_s) if overlaps else None
        self._planner = Planner()
        self._start_step = start_step
        self._finite_step: int | None = None
        """This attempt's latest step with finite loss and gradient norm; it followed all checkpoints below it."""
        self._waiting_for_proof: int | None = None
        """A checkpoint that was committed before a finite step followed it."""
        self._proof, self._deleting = threading.Lock(), threading.Lock()
        self._failed: CheckpointSaveError | None = None
        """The error of the latest save, if it failed before its thread started and training continued."""
        self.last_step: int | None = None
        """The latest step whose save was started."""
        self.longest_s = 0.0
        """Seconds that this attempt's longest save took."""
        self.last_path: Path | None = None
        """The latest committed checkpoint of this attempt."""

    def due(self, step: int) -> bool:
        """Whether ``checkpoint.every_n_steps`` asks for a save after this (one-based) step. Not collective."""
        every = self._config.every_n_steps
        return isinstance(every, int) and step % every == 0

    @property
    def must_stop(self) -> bool:
        """Whether a failed save known to this rank must end the run. Not collective: ranks may differ."""
        error = self._background.error if self._background is not None else None
        return error is not None and (self._config.on_save_error == "stop" or isinstance(error, NonFiniteError))

    def step_was_finite(self, step: int) -> None:
        """Record that the loss and the gradient norm of ``step`` were finite. Not collective."""
        with self._proof:
            self._finite_step = step
            waiting = self._waiting_for_proof
            if waiting is None or waiting >= step:
                return
            self._waiting_for_proof = None
        self._delete_old(waiting)

    def not_finite(self, what: str, step_batch: StepBatch) -> NonFiniteError:
        """Error of a step that was not finite; marks steps that no finite one followed as ruined. Not collective."""
        root = self._paths.checkpoints
        below = self._start_step if self._finite_step is None else self._finite_step
        if _is_rank_0():
            ruined = [step for step in layout.committed_steps(root) if below <= step <= step_batch.step]
            try:
                if ruined:
                    mark_ruined(root, ruined)
            except OSError as error:
                _warn(f"the checkpoints of steps {ruined} could not be marked as ruined: {error}")
        last = step_batch.first_sample + step_batch.num_samples - 1
        return NonFiniteError(what, step_batch.step + 1, step_batch.first_sample, last, self._newest_followed(below))

    def _newest_followed(self, below: int) -> Path | None:
        """The latest valid checkpoint below step ``below``; a finite step followed it."""
        good = newest_valid(self._paths.checkpoints, "fallback", "size", before=below)
        return good.path if good is not None else None

    def save(self, strategy: HoldsState, step: int, metrics: dict[str, float], *, last: bool = False) -> None:
        """Save ``step``, then delete checkpoints beyond retention: during training, or before this returns.

        Args:
            last: nothing is trained after this: written without a copy, and committed when this returns.

        Raises:
            CheckpointSaveError: on every rank, when any rank could not write: the last save, or any where
                ``checkpoint.on_save_error=stop``; also of a save that was started earlier.
            NonFiniteError: on every rank, when the weights or the optimizer's state are not finite.
        """
        background = self._background
        if background is not None:
            if self._config.when_busy == "skip" and not last and background.is_running_anywhere():
                _warn(
                    f"the checkpoint of step {step} is left out: the one before is still being written "
                    "(checkpoint.when_busy=skip)"
                )
                return
            self._raise_unless_reported(background.wait(), last=False)
        self._clock.note_save()
        self.last_step, self._failed = step, None
        root = self._paths.checkpoints
        shards = self._shards(strategy)
        state = self._state(strategy, step, metrics)
        try:
            plan = self._planner.plan(root, step, shards, None)
            if background is not None and not last:
                background.start(plan, shards, partial(self._write_in_background, plan, state))
                return
            if background is not None:
                background.release()
            self._write(plan, shards, state, None)
        except CheckpointSaveError as error:
            if self._continues_after_errors and not last:
                self._warn_of(error)
                self._failed = error  # the run may turn out to end here
            self._raise_unless_reported(error, last)

    def reserve(self, strategy: HoldsState, step: int) -> None:
        """Allocate the memory that asynchronous saves copy to, before the first of them, after ``step``."""
        if self._background is None or self.last_step is not None:
            return
        shards = self._shards(strategy)
        with suppress(CheckpointSaveError):  # the save will raise it
            plan = self._planner.plan(self._paths.checkpoints, step, shards, None)
            self._background.reserve(plan, shards)

    def before_writing(self) -> None:
        """Prepare for a write to weights or optimizer state, which a save may still read. Not collective."""
        if self._background is not None:
            self._background.before_writing()

    def finish(self, step: int) -> None:
        """Wait for the running save after ``step``, the last; CheckpointSaveError as in :meth:`save`."""
        error: Exception | None = self._failed
        if self._background is not None:
            error = self._background.wait() or error
        self._raise_unless_reported(error, last=self.last_step == step)
        if self._background is not None:
            self._background.release()

    def let_finish(self) -> None:
        """Let a running save be committed after training failed, and tell its outcome apart. Not collective."""
        if self._background is None:
            return
        error = self._background.wait(self._patience_s)
        if self._background.is_running:
            _warn(
                f"the checkpoint of step {self.last_step} was not written within {self._patience_s:g} s "
                "(launch.stop_timeout) and is left unfinished"
            )
        elif error is not None and not self._was_reported(error):
            _warn(f"WARNING: {error}" + ("" if isinstance(error, NonFiniteError) else f"; {self._last_good()}"))

    def _shards(self, strategy: HoldsState) -> RankShards:
        """This rank's shards to save."""
        optimizer = strategy.optimizer_shards()
        model = [shard for shard in strategy.model_shards() if shard.tensor_slice.name not in self._left_out]
        return RankShards(model, optimizer)

    @property
    def _continues_after_errors(self) -> bool:
        return self._config.on_save_error == "continue"

    def _state(self, strategy: HoldsState, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        return {
            **self._fixed_state,
            **copy.deepcopy(strategy.state_entries()),  # written later, when training has gone on
            **self._clock.state(),
            "step": step,
            "samples_consumed": step * self._fixed_state["global_batch_size"],
            # JSON has no infinity: a metric that overflowed is left out.
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
        }

    def _write_in_background(self, plan: Plan, state: dict[str, Any], shards: RankShards) -> None:
        assert self._background is not None
        try:
            self._write(plan, shards, state, self._background.group)
        except CheckpointSaveError as error:
            if self._continues_after_errors:
                self._warn_of(error)  # now, and not only at the next save
            raise

    def _write(self, plan: Plan, shards: RankShards, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        step, samples = int(state["step"]), int(state["samples_consumed"])
        began = time.monotonic()
        try:
            self.last_path = write(
                self._paths.checkpoints, step, plan, shards, state, self._paths.config, group, self._before_manifest
            )
        except NotFinite as error:
            good = self._newest_followed(step if self._finite_step is None else min(step, self._finite_step))
            first = samples - int(state["global_batch_size"])
            raise NonFiniteError(error.what, step, first, samples - 1, good, updated=True) from None
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        with self._proof:
            self._waiting_for_proof = step if self._finite_step is None or self._finite_step <= step else None
        self._delete_old(step)

    def _delete_old(self, newest: int) -> None:
        """Delete checkpoints beyond retention once ``newest`` exists."""
        if not _is_rank_0():
            return
        root, keep = self._paths.checkpoints, self._config
        try:
            with self._deleting:
                prune(root, keep.keep_last, keep.keep_every, self._best_steps(newest), newest, self._finite_step)
        except OSError as error:  # the new checkpoint is safe; the disk may fill up
            _warn(f"old checkpoints could not be deleted: {error}; delete them by hand")

    def _warn_of(self, error: CheckpointSaveError) -> None:
        _warn(f"WARNING: {error}; {self._last_good()}; training continues (checkpoint.on_save_error=continue)")

    def _was_reported(self, error: Exception) -> bool:
        """Whether the user was already warned of this error."""
        return self._continues_after_errors and isinstance(error, CheckpointSaveError)

    def _raise_unless_reported(self, error: Exception | None, last: bool) -> None:
        """Raise a save's error unless it was reported and the run is to continue."""
        if error is None or (not last and self._was_reported(error)):
            return
        if not isinstance(error, CheckpointSaveError):
            raise error
        fix = fix_of_writing(str(error), "free space or lower checkpoint.keep_last")
        fix = f"{fix}, and resume with checkpoint.resume=auto"
        if not self._paths.root.is_dir():
            fix = "the run's folder was moved or deleted"
        raise CheckpointSaveError(f"{error}; {self._last_good()}; {fix}") from error

    def _last_good(self) -> str:
        try:
            good = newest_valid(self._paths.checkpoints, "fallback", "size")
        except OSError as error:  # the disk that failed the save may not be there at all
            return f"which one is the last good one cannot be read ({error})"
        return f"the last good one is {good.path}" if good is not None else "no good one precedes it"

    def _best_steps(self, newest: int) -> list[int]:
        """The ``keep_best`` committed steps with the best ``best_metric``, of those up to ``newest``.

        A metric is measured before the step's update. So a step takes a place here when a finite step followed it.
        """
        if not self._config.keep_best:
            return []
        values: dict[int, float | None] = {}
        before = newest if self._finite_step is None else min(newest + 1, self._finite_step)
        ruined = ruined_steps(self._paths.checkpoints)
        for info in list_steps(self._paths.checkpoints):
            if info.whole and info.step < before and info.step not in ruined:
                metrics = json.loads((info.path / "state.json").read_text()).get("metrics", {})
                values[info.step] = metrics.get(self._config.best_metric)
        return best(values, self._config.keep_best, self._highest)


def restore_weights(reader: CheckpointReader, strategy: HoldsState) -> None:
    """Fill this rank's weights from a checkpoint, whichever strategy wrote it."""
    reader.read(strategy.model_shards(), "model")
    strategy.shards_written()


def restore_optimizer(reader: CheckpointReader, strategy: Any) -> None:
    """Fill this rank's optimizer state from a checkpoint, whichever strategy wrote it."""
    left = () if strategy.average.decay is not None else (f"/{EMA}",)  # what this run does not keep
    names = [name for name in reader.names("optimizer") if not name.endswith(left)]
    stored = {name: (reader.shape(name), reader.dtype(name)) for name in names}
    weights = {name: reader.dtype(name) for name in reader.names("model")}
    strategy.create_optimizer_state(stored, weights)
    strategy.restore_entries(reader.state)
    reader.read(strategy.optimizer_shards(), "optimizer")
    strategy.shards_written()


def _warn(text: str) -> None:
    """Log a warning, on rank 0 alone."""
    if _is_rank_0():
        _log.warning("%s", text)


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
