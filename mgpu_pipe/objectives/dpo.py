"""Direct preference optimisation: raises the chosen answer's probability over the rejected one's, against a reference.

Losses as in Rafailov et al. 2023 (arXiv:2305.18290), Mitchell 2023 (label smoothing) and Azar et al. 2023
(arXiv:2310.12036, with means over the answers' tokens).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.checkpoint.host_bytes import exchange_json
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field, StepBatch
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.adapters.lora import without_adapters
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.dpo_keys import DESCRIPTION, DPOConfig
from mgpu_pipe.objectives.first_weights import SPLITS, RunStart, is_whole, write_hashes
from mgpu_pipe.objectives.preference_pairs import (
    CHOSEN,
    NOTHING,
    REJECTED,
    PairObjective,
    documents_of_pairs,
    plain_answer,
    random_answers,
)
from mgpu_pipe.parallel.random_streams import step_seed
from mgpu_pipe.system.local_files import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel


UNKNOWN = -float("inf")
MATHEMATICS = 1
"""Version of the log-probabilities of answers. Raise it when the numbers change."""


class PairReference:
    """Reference log-probabilities of a run's pairs; empty until loaded or measured."""

    def __init__(self) -> None:
        self._tables: dict[Split, torch.Tensor] = {}
        """float64 (pairs, 2) by split: chosen and rejected answer."""
        self._recording: torch.Tensor | None = None
        """Table that :meth:`record` fills, or None."""

    def load(self, start: RunStart) -> bool:
        """Loads the table in the run's folder. Returns whether all ranks have all pairs of the run."""
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

    def measure(self, start: RunStart, strategy: Any, objective: Objective) -> None:
        """Measures all pairs of the run with the current weights. A collective call."""
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

    def _measure_split(self, start: RunStart, strategy: Any, objective: Objective, split: Split) -> torch.Tensor:
        needed = start.samples_needed(split)
        if not len(needed):
            return torch.zeros(0, 2, dtype=torch.float64, device=strategy.root_device)
        samples = objective.samples(start.config, start.prepared.open(start.config, split))
        table = torch.full((len(samples), 2), UNKNOWN, dtype=torch.float64, device=strategy.root_device)
        self._tables, self._recording = {}, table
        for step_batch in start.step_batches(samples, needed):
            strategy.run_evaluation(strategy.batch_to_device(self.add_to(step_batch, split)))
        self._recording = None
        if strategy.world_size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)  # all ranks that computed a pair have equal numbers
        return table

    def record(self, pairs: torch.Tensor, log_probabilities: torch.Tensor) -> None:
        """Stores log-probabilities of the pairs by number while :meth:`measure` runs."""
        if self._recording is not None:
            known = pairs >= 0
            self._recording[pairs[known]] = log_probabilities.detach()[known]

    def add_to(self, step_batch: StepBatch, split: Split) -> StepBatch:
        """Adds the field ``reference`` to micro-batches that lack it; zeros while unknown."""
        for batch in step_batch.micro_batches:
            if "pair" in batch and "reference" not in batch:
                batch["reference"] = self.values_for(batch, split)
        return step_batch

    def values_for(self, batch: Mapping[str, torch.Tensor], split: Split) -> torch.Tensor:
        """Reference log-probabilities of a micro-batch, float64 (rows, 2)."""
        pairs, table = batch["pair"], self._tables.get(split)
        if table is None:
            return torch.zeros(len(pairs), 2, dtype=torch.float64, device=pairs.device)
        self._tables[split] = table = table.to(pairs.device)
        return table[pairs.clamp_min(0)]


class DPOObjective(PairObjective):
    """Preference of chosen over rejected answers under a Hugging Face causal language model.

    Args:
        keys: ``objective.*``.
    """

    description = DESCRIPTION
    keys: DPOConfig
    num_sums = 8
    measures_weights: Literal["first", "loaded"] = "first"

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: DPOConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self._reference = PairReference()

    @property
    def batch_spec(self) -> BatchSpec:
        """That of pairs, and ``reference``, float64 (rows, 2), the reference's log-probabilities of the chosen and the
        rejected answer, for the last stage."""
        pairs = super().batch_spec
        reference = Field(sequence_dim=None, dtype="float64", shape=(2,), stages="last")
        return replace(pairs, fields={**pairs.fields, "reference": reference})

    # -- the reference ------------------------------------------------------------------------------------------

    def needs_first_weights(self, start: RunStart) -> bool:
        return self.keys.reference == "cached" and not self._reference.load(start)

    def first_weights(self, start: RunStart) -> None:
        self._reference.measure(start, self.trainer.strategy, self)

    def of_run(self, start: RunStart) -> None:
        if self.needs_first_weights(start):
            raise BadInputError(
                f"{self._reference.file(start)}: no such numbers of the reference for these pairs; "
                "evaluate the run's own data"
            )

    def training_step(self, step_batch: StepBatch, batch_idx: int) -> dict[str, Any]:
        return super().training_step(self._reference.add_to(step_batch, "train"), batch_idx)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        super().validation_step(self._reference.add_to(step_batch, "validation"), batch_idx)

    # -- the loss -----------------------------------------------------------------------------------------------

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.contribute_once(self._pair_losses(batch)[0].sum())

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        losses, rewards, said, said_before = self._pair_losses(batch)
        right = rewards[:, CHOSEN] > rewards[:, REJECTED]
        sums = [losses.sum(0, True), right.sum(0, True), rewards.sum(0), said.sum(0), said_before.sum(0)]
        return self.contribute_once(torch.cat(sums).double())

    def _pair_losses(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Loss of each pair, (rows,); rewards, probabilities and reference probabilities of its answers, (rows, 2).

        All are 0 where a pair counts nothing.
        """
        if self.keys.reference == "live":
            with torch.no_grad(), without_adapters(self.model):
                reference, _ = self.answers(batch)
        else:
            reference = batch["reference"] if "reference" in batch else self._reference.values_for(batch, "validation")
        log_probabilities, tokens = self.answers(batch)
        self._reference.record(batch["pair"], log_probabilities)
        counts = batch["pair"] != NOTHING
        losses, rewards = preference_losses(log_probabilities, reference, tokens, self.keys)
        answer_values = (rewards, log_probabilities.detach().exp(), reference.exp())
        return losses.where(counts, 0.0), *[value.where(counts.unsqueeze(1), 0.0) for value in answer_values]

    # -- verification -------------------------------------------------------------------------------------------

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Pairs as :func:`.random_answers` makes them, with random numbers of the reference."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        ids = self.random_ids(generator, samples, seq_len)
        reference = -torch.rand(samples, 2, generator=generator, dtype=torch.float64)
        batch = random_answers(generator, step, ids)
        counts, rejected = batch["labels"] != IGNORE_INDEX, batch["rejected"] == 1
        tokens = torch.stack([(counts & side).sum(1) for side in (~rejected, rejected)], dim=1)
        vocabulary = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        return {**batch, "reference": reference - tokens.double() * float(torch.tensor(vocabulary).log())}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time, by the formulas of the papers."""
        losses = []
        for row, documents in documents_of_pairs(batch):
            gained = []
            for side, document in enumerate(documents):
                answer, tokens = plain_answer(forward, batch, row, document)
                before = batch["reference"][row, side].to(answer.dtype)
                if self.keys.reference == "live":
                    with torch.no_grad(), without_adapters(model):
                        before, _ = plain_answer(forward, batch, row, document)
                gain = answer - before
                gained.append(gain / tokens if self.keys.loss == "ipo" else gain)
            losses.append(self._plain_loss(gained[CHOSEN] - gained[REJECTED]))
        return Reference(torch.stack(losses).sum())

    def _plain_loss(self, margin: torch.Tensor) -> torch.Tensor:
        beta, flipped = self.keys.beta, self.keys.label_smoothing
        if self.keys.loss == "ipo":
            return (margin - 0.5 / beta) ** 2
        wins = torch.sigmoid(beta * margin)
        return -(1 - flipped) * wins.log() - flipped * (1 - wins).log()


def preference_losses(
    answers: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor, keys: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair, (rows,), and rewards of its answers, (rows, 2).

    Args:
        answers, reference: log-probabilities of the answers, float64 (rows, 2).
        tokens: token counts of the answers, (rows, 2).
    """
    gains = answers - reference
    if keys.loss == "ipo":
        gains = gains / tokens.clamp_min(1.0)
    margin = gains[:, CHOSEN] - gains[:, REJECTED]
    rewards = keys.beta * gains.detach()
    if keys.loss == "ipo":
        return (margin - 0.5 / keys.beta).square(), rewards
    losses = -F.logsigmoid(keys.beta * margin) * (1 - keys.label_smoothing)
    if keys.label_smoothing:
        losses = losses - F.logsigmoid(-keys.beta * margin) * keys.label_smoothing
    return losses, rewards


OBJECTIVE = DPOObjective
