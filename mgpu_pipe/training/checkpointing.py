"""When a run saves, what its state file says, and how a run takes its state back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from mgpu_pipe.checkpoint.boxes import Piece
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.retention import prune
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.select import list_steps, newest_valid
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig
from mgpu_pipe.errors import CheckpointSaveError


class HoldsState(Protocol):
    """What saving asks of a strategy."""

    def model_pieces(self) -> list[Piece]: ...

    def optimizer_pieces(self) -> list[Piece]: ...

    def pieces_written(self) -> None: ...


class Checkpointer:
    """Saves a run's checkpoints and prunes old ones. Every method is a collective call.

    Args:
        fixed_state: entries of ``state.json`` that are the same at every step (topology, seed, horizon, ...).
    """

    def __init__(self, config: CheckpointConfig, paths: RunPaths, fixed_state: dict[str, Any]) -> None:
        self._config, self._paths, self._fixed_state = config, paths, fixed_state
        self.last_step: int | None = None
        self.last_path: Path | None = None

    def due(self, step: int) -> bool:
        """Whether ``checkpoint.every_n_steps`` asks for a save after this (one-based) step."""
        every = self._config.every_n_steps
        return every is not None and step % every == 0

    def save(self, strategy: HoldsState, step: int, metrics: dict[str, float]) -> Path:
        """Commit a checkpoint of ``step``, then delete those that retention gives up.

        Raises:
            CheckpointSaveError: on every rank, when any rank could not write.
        """
        state = {
            **self._fixed_state,
            "step": step,
            "samples_consumed": step * self._fixed_state["global_batch_size"],
            # JSON has no infinity: a perplexity that overflowed is left out.
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
        }
        try:
            path = save(
                self._paths.checkpoints, step, strategy.model_pieces(), strategy.optimizer_pieces(), state,
                self._paths.config,
            )
        except CheckpointSaveError as error:
            good = newest_valid(self._paths.checkpoints, "fallback", "size")
            last = f"the last good one is {good.path}" if good is not None else "there is none before it"
            fix = "free space or lower checkpoint.keep_last, and go on with checkpoint.resume=auto"
            raise CheckpointSaveError(f"{error}; {last}; {fix}") from error
        self.last_step, self.last_path = step, path
        if not dist.is_initialized() or dist.get_rank() == 0:
            keep = self._config
            prune(self._paths.checkpoints, keep.keep_last, keep.keep_every, self._best_steps())
        return path

    def _best_steps(self) -> list[int]:
        """The ``keep_best`` committed steps with the lowest ``best_metric``."""
        if not self._config.keep_best:
            return []
        ranked: list[tuple[float, int]] = []
        for info in list_steps(self._paths.checkpoints):
            if info.valid:
                metrics = json.loads((info.path / "state.json").read_text()).get("metrics", {})
                if self._config.best_metric in metrics:
                    ranked.append((metrics[self._config.best_metric], info.step))
        return [step for _, step in sorted(ranked)[: self._config.keep_best]]


def restore_weights(reader: CheckpointReader, strategy: HoldsState) -> None:
    """Fill this rank's weights from a checkpoint, whichever strategy wrote it."""
    reader.read(strategy.model_pieces(), "model")
    strategy.pieces_written()


def restore_optimizer(reader: CheckpointReader, strategy: Any) -> None:
    """Fill this rank's optimizer state from a checkpoint, whichever strategy wrote it."""
    stored = {name: (reader.shape(name), reader.dtype(name)) for name in reader.names("optimizer")}
    strategy.create_optimizer_state(stored)
    reader.read(strategy.optimizer_pieces(), "optimizer")
    strategy.pieces_written()
