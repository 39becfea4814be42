"""What an objective is given that looks at a run's first weights, before a step has changed them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import digest_of
from mgpu_pipe.data.loader import EvaluationStepBatches
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.samples import Prepared, SampleSet, Split
from mgpu_pipe.topology import BatchPlan

DIGITS = 12
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True)
class RunStart:
    """A run that begins, or goes on."""

    config: RunConfig
    folder: Path
    """The run's."""
    prepared: Prepared
    plan: BatchPlan
    data_parallel_rank: int
    max_steps: int
    """Of the whole run."""

    @property
    def file(self) -> str:
        """Name of what is kept of them: a hash of the samples. All of a run's attempts begin with the same weights."""
        samples = digest_of(self.prepared.digest, self.prepared.validation_digest)
        return f"reference-{samples[:DIGITS]}.npy"

    def needed(self, split: Split) -> NDArray[np.int64]:
        """Samples that the run asks for, ascending: those that it trains on, or evaluates."""
        if split == "validation":
            return self.prepared.evaluated_samples()
        available = self.prepared.train_samples
        wanted = min(available, self.max_steps * self.plan.global_batch_size)
        return np.unique(GlobalOrder(self.config.seed, available).indices(0, wanted))

    def once(self, samples: SampleSet, needed: NDArray[np.int64]) -> EvaluationStepBatches:
        """This process's share of the samples ``needed``, once each; of every process as many, for an engine may have
        none to stand in for those that it lacks."""
        short = -len(needed) % self.plan.data_parallel_size
        every = np.concatenate([needed, np.repeat(needed[-1:], short)])
        return EvaluationStepBatches(samples, every, self.plan, self.data_parallel_rank)
