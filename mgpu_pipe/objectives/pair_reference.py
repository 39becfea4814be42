"""The log-probabilities of pairs under the reference, a run's first weights: two numbers a pair.

They are taken once, before the first step, by the strategy that trains, and kept in the run's folder; so no second
model is in memory, and a run that goes on reads them.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mgpu_pipe.checkpoint.exchange import exchange_json
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.first_weights import SPLITS, RunStart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mgpu_pipe.objectives.base import Objective

UNKNOWN = -float("inf")


class PairReference:
    """Of a run's pairs; knows none until they were loaded or measured."""

    def __init__(self) -> None:
        self._tables: dict[Split, torch.Tensor] = {}
        """float64 (pairs, 2) by split: of the chosen and of the rejected answer."""
        self._noting: torch.Tensor | None = None
        """The table that is being filled."""

    def load(self, start: RunStart) -> bool:
        """Take what the run's folder keeps, as every rank sees it alike; whether that is all that the run needs."""
        return all(exchange_json(self._read(start), None))

    def _read(self, start: RunStart) -> bool:
        try:
            whole = np.load(start.folder / start.file, allow_pickle=False)
        except (OSError, ValueError):
            return False
        first = start.prepared.train_samples
        tables: dict[Split, NDArray[np.float64]] = {"train": whole[:first], "validation": whole[first:]}
        if not all(np.isfinite(tables[split][start.needed(split)]).all() for split in SPLITS):
            return False
        self._tables = {split: torch.from_numpy(table.astype(np.float64)) for split, table in tables.items()}
        return True

    def measure(self, start: RunStart, strategy: Any, objective: Objective) -> None:
        """Take all that the run needs from the weights that there are. A collective call."""
        mode = objective.training
        objective.eval()
        measured = {split: self._measured(start, strategy, objective, split) for split in SPLITS}
        objective.train(mode)
        self._tables = measured
        if strategy.is_global_zero:
            file = io.BytesIO()
            np.save(file, torch.cat([measured[split].cpu() for split in SPLITS]).numpy(), allow_pickle=False)
            replace_file(start.folder / start.file, file.getvalue(), flush=True)

    def _measured(self, start: RunStart, strategy: Any, objective: Objective, split: Split) -> torch.Tensor:
        needed = start.needed(split)
        if not len(needed):
            return torch.zeros(0, 2, dtype=torch.float64, device=strategy.root_device)
        samples = objective.samples(start.config, start.prepared.open(start.config, split))
        table = torch.full((len(samples), 2), UNKNOWN, dtype=torch.float64, device=strategy.root_device)
        self._tables, self._noting = {}, table
        for step_batch in start.once(samples, needed):
            strategy.run_evaluation(strategy.batch_to_device(self.added(step_batch, split)))
        self._noting = None
        if strategy.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)  # whoever computed a pair has the same numbers
        return table

    def note(self, pairs: torch.Tensor, found: torch.Tensor) -> None:
        """While measuring, keep what was found of the pairs of these numbers."""
        if self._noting is not None:
            known = pairs >= 0
            self._noting[pairs[known]] = found.detach()[known]

    def added(self, step_batch: StepBatch, split: Split) -> StepBatch:
        """``step_batch``, its micro-batches with the field ``reference`` where they lack it; zeros while unknown."""
        for batch in step_batch.micro_batches:
            if "pair" in batch and "reference" not in batch:
                batch["reference"] = self.of(batch, split)
        return step_batch

    def of(self, batch: Mapping[str, torch.Tensor], split: Split) -> torch.Tensor:
        """Of the pairs of a micro-batch, float64 (rows, 2)."""
        pairs, table = batch["pair"], self._tables.get(split)
        if table is None:
            return torch.zeros(len(pairs), 2, dtype=torch.float64, device=pairs.device)
        self._tables[split] = table = table.to(pairs.device)
        return table[pairs.clamp_min(0)]
