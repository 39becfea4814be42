"""What an objective is given that looks at a run's first weights, before a step has changed them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import digest_of
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.topology import BatchPlan

DIGITS = 12


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
