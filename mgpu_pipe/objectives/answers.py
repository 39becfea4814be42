"""Objectives over the log-probabilities of whole answers, such as preferences."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.objectives.base import Batch, Forward, KeyedObjective, LearningRate
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.first_weights import SPLITS, RunStart, is_whole, write_hashes
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.losses.router_balance import SummedOverRanks
from mgpu_pipe.objectives.text_keys import ReferencedConfig, TokenLossConfig
from mgpu_pipe.parallel.rank_exchange import exchange_json
from mgpu_pipe.system.local_files import replace_file

NOTHING = -1
"""Number of a sample that counts nothing."""


class AnswerObjective(KeyedObjective):
    """Base of objectives over log-probabilities of whole answers under a Hugging Face causal language model."""

    keys: TokenLossConfig

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: TokenLossConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self._loss = TokenLoss(model, keys.loss_chunk_tokens)
        self._sequences: dist.ProcessGroup | None = None

    def share_sequences(self, groups: Sequence[dist.ProcessGroup], along: dist.ProcessGroup | None) -> None:
        for group in groups:
            self._sequences = group

    sampling_batch = CausalLMObjective.sampling_batch
    row_losses = CausalLMObjective.row_losses

    def token_values(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each token of the answers, and 1 for these tokens; float64 (rows, seq_len)."""
        labels = batch["labels"]
        return -self._loss.by_token(self.model_inputs(batch), labels).double(), (labels != IGNORE_INDEX).double()

    def sum_over_sequences(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold other tokens of the same sequences."""
        return sums if self._sequences is None else SummedOverRanks.apply(sums, self._sequences)

    def contribute_once(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` on one of the ranks that share sequences, zero on the others, with the same gradient."""
        first = self._sequences is None or self._sequences.rank() == 0
        return value if first else value - value.detach()

    def random_ids(self, generator: torch.Generator, samples: int, seq_len: int) -> torch.Tensor:
        """Random tokens of the model's vocabulary, int64 (samples, seq_len)."""
        vocabulary = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        return torch.randint(0, vocabulary, (samples, seq_len), generator=generator)


def plain_answer(forward: Forward, batch: Batch, row: int, document: slice) -> tuple[torch.Tensor, int]:
    """Log-probability of one answer, alone and from whole logits, and its number of tokens."""
    labels = batch["labels"][row, document]
    logits = forward(input_ids=batch["input_ids"][row, None, document]).logits[0].float()
    value = -F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return value, int((labels != IGNORE_INDEX).sum())


UNKNOWN = -float("inf")
MATHEMATICS = 1
"""Version of the log-probabilities of answers. Raise it when the numbers change."""


class ReferenceTable:
    """Reference log-probabilities of a run's samples, two a sample; empty until loaded or measured.

    Args:
        number: field of a micro-batch with the samples' numbers.
    """

    def __init__(self, number: str) -> None:
        self._number = number
        self._tables: dict[Split, torch.Tensor] = {}
        """float64 (samples, 2) by split."""
        self._recording: torch.Tensor | None = None
        """Table that :meth:`record` fills, or None."""

    def load(self, start: RunStart) -> bool:
        """Loads the table in the run's folder. Returns whether all ranks have all samples of the run."""
        path = self.file(start)
        return is_whole(path) and all(exchange_json(self._read(start, path), None))

    @staticmethod
    def file(start: RunStart) -> Path:
        """Path of the table. A collective call."""
        return start.file("reference", MATHEMATICS)

    def _read(self, start: RunStart, path: Path) -> bool:
        try:
            whole = np.load(path, allow_pickle=False)
        except (OSError, ValueError):
            return False
        first = start.prepared.train_samples
        tables: dict[Split, NDArray[np.float64]] = {"train": whole[:first], "validation": whole[first:]}
        if not all(np.isfinite(tables[split][start.samples_needed(split)]).all() for split in SPLITS):
            return False
        self._tables = {split: torch.from_numpy(table.astype(np.float64)) for split, table in tables.items()}
        return True

    def measure(self, start: RunStart, strategy: Any, objective: ReferencedAnswers) -> None:
        """Measures all samples of the run with the current weights. A collective call."""
        mode = objective.training
        objective.eval()
        measured = {split: self._measure_split(start, strategy, objective, split) for split in SPLITS}
        objective.train(mode)
        self._tables = measured
        path = self.file(start)
        if strategy.is_global_zero:
            file = io.BytesIO()
            np.save(file, torch.cat([measured[split].cpu() for split in SPLITS]).numpy(), allow_pickle=False)
            replace_file(path, file.getvalue(), flush=True)
        strategy.barrier()
        write_hashes(path)

    def _measure_split(
        self, start: RunStart, strategy: Any, objective: ReferencedAnswers, split: Split
    ) -> torch.Tensor:
        needed = start.samples_needed(split)
        if not len(needed):
            return torch.zeros(0, 2, dtype=torch.float64, device=strategy.root_device)
        samples = objective.samples(start.config, start.prepared.open(start.config, split))
        table = torch.full((len(samples), 2), UNKNOWN, dtype=torch.float64, device=strategy.root_device)
        self._tables, self._recording = {}, table
        for step_batch in start.step_batches(samples, needed):
            objective.read_answers(strategy.batch_to_device(self.add_to(step_batch, split)), strategy)
        self._recording = None
        if strategy.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)  # all ranks that computed a sample have equal numbers
        return table

    def record(self, samples: torch.Tensor, log_probabilities: torch.Tensor, column: int = 0) -> None:
        """Stores columns of samples' log-probabilities, (rows, columns), from ``column`` on, while :meth:`measure`
        runs."""
        if self._recording is not None:
            known = samples >= 0
            columns = slice(column, column + log_probabilities.shape[1])
            self._recording[samples[known], columns] = log_probabilities.detach()[known]

    def add_to(self, step_batch: StepBatch, split: Split) -> StepBatch:
        """Adds the field ``reference`` to micro-batches that lack it; zeros while unknown."""
        for batch in step_batch.micro_batches:
            if self._number in batch and "reference" not in batch:
                batch["reference"] = self.values_for(batch, split)
        return step_batch

    def values_for(self, batch: Mapping[str, torch.Tensor], split: Split) -> torch.Tensor:
        """Reference log-probabilities of a micro-batch, float64 (rows, 2)."""
        samples, table = batch[self._number], self._tables.get(split)
        if table is None:
            return torch.zeros(len(samples), 2, dtype=torch.float64, device=samples.device)
        self._tables[split] = table = table.to(samples.device)
        return table[samples.clamp_min(0)]


class ReferencedAnswers(AnswerObjective):
    """Base of objectives that compare answers with those of a reference model.

    Attributes:
        number: field of a micro-batch with the samples' numbers.
        reference_table: the reference's log-probabilities, two a sample.
    """

    keys: ReferencedConfig
    number: str
    measures_weights: Literal["first", "loaded"] = "first"

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: ReferencedConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self.reference_table = ReferenceTable(self.number)

    def needs_first_weights(self, start: RunStart) -> bool:
        return self.keys.reference == "cached" and not self.reference_table.load(start)

    def first_weights(self, start: RunStart) -> None:
        self.reference_table.measure(start, self.trainer.strategy, self)

    def of_run(self, start: RunStart) -> None:
        if self.needs_first_weights(start):
            raise BadInputError(
                f"{self.reference_table.file(start)}: no such numbers of the reference for these samples; "
                "evaluate the run's own data"
            )

    def read_answers(self, step_batch: StepBatch, strategy: Any) -> None:
        """Runs the model over the answers of a step batch while the table records them. Collective."""
        strategy.run_evaluation(step_batch)

    def reference_of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Reference log-probabilities of a micro-batch, float64 (rows, 2)."""
        if "reference" in batch:
            return batch["reference"]
        return self.reference_table.values_for(batch, "validation")

    def training_step(self, step_batch: StepBatch, batch_idx: int) -> dict[str, Any]:
        return super().training_step(self.reference_table.add_to(step_batch, "train"), batch_idx)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        super().validation_step(self.reference_table.add_to(step_batch, "validation"), batch_idx)
