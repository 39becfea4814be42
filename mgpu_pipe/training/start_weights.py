"""Loads the weights and the optimizer state that an attempt starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.models.weights.pretrained import restore_buffers
from mgpu_pipe.optim.moving_average import EMA
from mgpu_pipe.training.save_and_resume import HoldsState


@dataclass(frozen=True)
class StartWeights:
    """The checkpoints that an attempt starts from.

    Attributes:
        first: has the run's first weights, where they are not drawn or read from a folder.
        resumed: has the weights and the optimizer state that the attempt resumes.
        measure: called on every rank, with "first" when the run's first weights are there and then with "loaded" when
            those are that the attempt trains.
    """

    first: CheckpointReader | None = None
    resumed: CheckpointReader | None = None
    measure: Callable[[str], None] = lambda weights: None

    @property
    def source(self) -> CheckpointReader | None:
        """The checkpoint whose weights the attempt trains; None where it has none."""
        return self.first if self.resumed is None else self.resumed

    def load(self, strategy: Any, model: torch.nn.Module) -> None:
        """Fill this rank's part of ``model`` and of the optimizer's state. A collective call."""
        if self.first is not None:
            _fill(self.first, strategy, model)
        self.measure("first")
        if self.resumed is not None:
            _fill(self.resumed, strategy, model)
            restore_optimizer(self.resumed, strategy)
        self.measure("loaded")


def _fill(reader: CheckpointReader, strategy: Any, model: torch.nn.Module) -> None:
    restore_weights(reader, strategy)
    restore_buffers(model, reader.state, reader.folder)


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
