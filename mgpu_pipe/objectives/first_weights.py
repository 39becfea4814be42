"""Arrays computed once from a run's weights before the first step of an attempt, and their files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import BLOCK_BYTES, block_hash, digest_of, read_block, read_hashed, write_hashed
from mgpu_pipe.data.loader import EvaluationStepBatches
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.samples import Prepared, SampleSet, Split
from mgpu_pipe.parallel.rank_exchange import exchange_json, rank_and_size
from mgpu_pipe.topology import BatchPlan

_log = logging.getLogger(__name__)
_NAME_DIGITS = 12

State = Literal["missing", "damaged", "whole"]


def array_file(folder: Path, kind: str, *decided: object) -> Path:
    """Path of an array file, another for each of the JSON values that ``decided`` it."""
    return folder / f"{kind}-{digest_of(*decided)[:_NAME_DIGITS]}.npy"


def write_hashes(path: Path) -> None:
    """Commits the complete array file ``path`` by writing its hashes. A collective call."""
    shares = exchange_json(_hashes_of_share(path), None)
    if rank_and_size(None)[0] == 0:
        blocks = [block for _, block in sorted((index, block) for share in shares for index, block in share)]
        write_hashed(_hashes_file(path), {"size": path.stat().st_size, "blocks": blocks})
    exchange_json(None, None)


def is_whole(path: Path) -> bool:
    """Whether ``path`` is intact by its hashes. Warns of damage. A collective call."""
    states = exchange_json(_state_of_share(path), None)
    if "damaged" in states and rank_and_size(None)[0] == 0:
        _log.warning("%s is damaged: it is computed again", path)
    return all(state == "whole" for state in states)


def _state_of_share(path: Path) -> State:
    if not path.is_file():
        return "missing"
    try:
        written = read_hashed(_hashes_file(path))
        if path.stat().st_size != written["size"]:
            return "damaged"
        same = all(written["blocks"][index] == block for index, block in _hashes_of_share(path))
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return "damaged"
    return "whole" if same else "damaged"


def _hashes_of_share(path: Path) -> list[tuple[int, str]]:
    """Blocks that this process hashes, with their indices in the file."""
    rank, size = rank_and_size(None)
    with open(path, "rb", buffering=0) as file:
        count = -(-os.fstat(file.fileno()).st_size // BLOCK_BYTES)
        return [(index, block_hash(read_block(file.fileno(), index))) for index in range(rank, count, size)]


def _hashes_file(path: Path) -> Path:
    return path.with_suffix(".json")


MEASURED = "measured_weights"
"""Field of ``state.json``: digest of the weights that the stored arrays come from; null without arrays."""
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True)
class RunStart:
    """Facts of a run that begins or resumes."""

    config: RunConfig
    folder: Path
    """The run's folder."""
    prepared: Prepared
    plan: BatchPlan
    data_parallel_rank: int
    max_steps: int
    """Steps of the whole run."""
    precision: str
    """Resolved precision of forward passes."""
    weights_digest: Callable[[], str]
    """Digest of the weights that arrays are computed from. A collective call."""

    @cached_property
    def weights(self) -> str:
        """:attr:`weights_digest`, computed once. The first use is a collective call."""
        return self.weights_digest()

    @property
    def known_weights(self) -> str | None:
        """:attr:`weights` if already computed, else None."""
        return self.__dict__.get("weights")

    def file(self, kind: str, *decided: object) -> Path:
        """Path of a ``kind`` of array that depends on weights, samples and the JSON values ``decided``. A collective
        call."""
        samples = (self.prepared.digest, self.prepared.validation_digest, self.config.data.seq_len)
        return array_file(self.folder, kind, self.weights, self.precision, samples, *decided)

    def samples_needed(self, split: Split) -> NDArray[np.int64]:
        """Samples that the run trains on or evaluates, ascending."""
        if split == "validation":
            return self.prepared.evaluated_samples()
        available = self.prepared.train_samples
        wanted = min(available, self.max_steps * self.plan.global_batch_size)
        return np.unique(GlobalOrder(self.config.seed, available).indices(0, wanted))

    def step_batches(self, samples: SampleSet, indices: NDArray[np.int64]) -> EvaluationStepBatches:
        """This process's share of ``samples`` at ``indices``, each once; equally many on all processes."""
        short = -len(indices) % self.plan.data_parallel_size
        every = np.concatenate([indices, np.repeat(indices[-1:], short)])
        return EvaluationStepBatches(samples, every, self.plan, self.data_parallel_rank)
