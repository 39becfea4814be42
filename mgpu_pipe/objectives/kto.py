"""Kahneman-Tversky optimisation: raises desirable answers and lowers undesirable ones, each against a reference point.

The losses are those of Ethayarajh et al. 2024 (arXiv:2402.01306). The reference point estimates the divergence of the
model from its reference. It is a mean over the prompts of the global batch, each with another sample's answer. So a
step batch is read twice: first these, without gradients, then its own answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field, StepBatch
from mgpu_pipe.data.text.preferences import UNRELATED
from mgpu_pipe.models.adapters.lora import without_adapters
from mgpu_pipe.objectives.answers import NOTHING, ReferencedAnswers, plain_answer
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference, StepStrategy, step_generator
from mgpu_pipe.objectives.packed_text import STARTS, packed_text, skips_last
from mgpu_pipe.objectives.preference_keys import KTO, KTOConfig
from mgpu_pipe.parallel.context.attention import DOCUMENTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_ANSWER, UNRELATED_ANSWER = 0, 1
"""Columns of the reference's log-probabilities."""


class KTOObjective(ReferencedAnswers):
    """Losses of desirable and undesirable answers under a Hugging Face causal language model, a mean over answers."""

    description = KTO
    keys: KTOConfig
    number = "sample"
    num_sums = 6

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: KTOConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        self._column = OWN_ANSWER
        self._point = torch.zeros((), dtype=torch.float64)

    @property
    def batch_spec(self) -> BatchSpec:
        """Rows of one conversation each, and the same with the prefix ``unrelated_``: its prompt with the answer of
        another sample. For the last stage: ``desirable``, 1 or 0, ``sample``, the sample's number, both int64 (rows,);
        and ``reference``, float64 (rows, 2), the reference's log-probabilities of the two answers."""
        packed = packed_text()
        rows = {**packed.fields, "labels": replace(packed.fields["labels"], target=False)}
        fields = {
            **rows,
            **{UNRELATED + name: field for name, field in rows.items()},
            "desirable": Field(sequence_dim=None, stages="last"),
            "sample": Field(sequence_dim=None, padding=NOTHING, target=True, stages="last"),
            "reference": Field(sequence_dim=None, dtype="float64", shape=(2,), stages="last"),
        }
        return replace(packed, fields=fields)

    def start_step(self, step_batch: StepBatch) -> None:
        strategy = cast(StepStrategy, self.trainer.strategy)

        def evaluate(batch: StepBatch) -> torch.Tensor:
            sums = strategy.run_evaluation(batch)  # a scalar zero on ranks without sums
            return strategy.sum_over_data(sums + sums.new_zeros(self.num_sums))

        self.measure_step(step_batch, evaluate)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        self.start_step(self.reference_table.add_to(step_batch, "validation"))
        super().validation_step(step_batch, batch_idx)

    def measure_step(self, step_batch: StepBatch, evaluate: Callable[[StepBatch], torch.Tensor]) -> None:
        mode = self.training
        self.eval()
        with self._reading_unrelated():
            sums = evaluate(_with_unrelated(step_batch))
        self.train(mode)
        self._point = (sums[0] / step_batch.loss_divisor).clamp_min(0)

    def read_answers(self, step_batch: StepBatch, strategy: Any) -> None:
        super().read_answers(step_batch, strategy)
        with self._reading_unrelated():
            super().read_answers(_with_unrelated(step_batch), strategy)

    @contextmanager
    def _reading_unrelated(self) -> Iterator[None]:
        """Context in which micro-batches hold answers of other samples."""
        self._column = UNRELATED_ANSWER
        try:
            yield
        finally:
            self._column = OWN_ANSWER

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.contribute_once(self._answer_losses(batch, self._gains(batch))[0].sum())

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        gains = self._gains(batch)
        if self._column == UNRELATED_ANSWER:
            return self.contribute_once(torch.stack([gains.sum(), *gains.new_zeros(self.num_sums - 1)]))
        losses, right, counts = self._answer_losses(batch, gains)
        good, rewards = batch["desirable"] == 1, self.keys.beta * gains
        values = (losses, right, rewards * good, good, rewards * ~good, self._point.to(gains).expand_as(gains))
        return self.contribute_once(torch.stack([value.where(counts, 0).double().sum() for value in values]))

    def _gains(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Log-probability of each row's answer over that under the reference, float64 (rows,); 0 where none counts."""
        if self.keys.reference == "live":
            with torch.no_grad(), without_adapters(self.model):
                reference = self._answers(batch)
        else:
            reference = self.reference_of(batch)[:, self._column]
        answers = self._answers(batch)
        self.reference_table.record(batch["sample"], answers.unsqueeze(1), self._column)
        return (answers - reference).where(batch["sample"] != NOTHING, 0.0)

    def _answers(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of the answers, float64 (rows,)."""
        values, counts = self.token_values(batch)
        return self.sum_over_sequences((values * counts).sum(1))

    def _answer_losses(
        self, batch: Mapping[str, torch.Tensor], gains: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss of each answer, 0 where none counts; whether it is on its side of the reference point; whether it
        counts. (rows,) each."""
        good, counts = batch["desirable"] == 1, batch["sample"] != NOTHING
        over_point = torch.where(good, 1.0, -1.0) * (gains - self._point.to(gains))
        weights = torch.where(good, self.keys.desirable_weight, self.keys.undesirable_weight)
        losses = weights * (1 - torch.sigmoid(self.keys.beta * over_point))
        return losses.where(counts, 0.0), over_point > 0, counts

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Conversations of uneven lengths with random labels and numbers of the reference, near the model's. In every
        third step the last one counts nothing."""
        generator = step_generator(seed, step)
        vocabulary = float(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        batch, tokens = {}, []
        for prefix in ("", UNRELATED):
            rows = _random_rows(generator, self.random_ids(generator, samples, seq_len))
            batch.update({prefix + name: value for name, value in rows.items()})
            tokens.append((rows["labels"] != IGNORE_INDEX).sum(1).double())
        noise = torch.rand(samples, 2, generator=generator, dtype=torch.float64) - 0.5
        sample = torch.arange(samples)
        if skips_last(step, samples):
            sample[-1] = NOTHING
        return {
            **batch,
            "desirable": torch.randint(0, 2, (samples,), generator=generator),
            "sample": sample,
            "reference": noise - torch.stack(tokens, 1) * float(torch.tensor(vocabulary).log()),
        }

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time, by the formulas of the paper."""
        rows = [row for row, sample in enumerate(batch["sample"].tolist()) if sample != NOTHING]
        unrelated = _exchange_answers(batch)
        with torch.no_grad():
            gains = [self._plain_gain(forward, model, unrelated, row, UNRELATED_ANSWER) for row in rows]
            point = torch.stack(gains).mean().clamp(min=0)
        losses = []
        for row in rows:
            gain = self.keys.beta * (self._plain_gain(forward, model, batch, row, OWN_ANSWER) - point)
            if int(batch["desirable"][row]):
                losses.append(self.keys.desirable_weight * torch.sigmoid(-gain))
            else:
                losses.append(self.keys.undesirable_weight * torch.sigmoid(gain))
        return Reference(torch.stack(losses).sum())

    def _plain_gain(
        self, forward: Forward, model: PreTrainedModel, batch: Batch, row: int, column: int
    ) -> torch.Tensor:
        document = slice(0, int((batch["labels"][row] != IGNORE_INDEX).nonzero().max()) + 2)
        answer, _ = plain_answer(forward, batch, row, document)
        if self.keys.reference == "live":
            with torch.no_grad(), without_adapters(model):
                before, _ = plain_answer(forward, batch, row, document)
        else:
            before = batch["reference"][row, column]
        return answer.double() - before.double()


def _with_unrelated(step_batch: StepBatch) -> StepBatch:
    """The step batch whose rows hold the answers of other samples."""
    batches = [_exchange_answers(batch) for batch in step_batch.micro_batches]
    return replace(step_batch, micro_batches=batches)


def _exchange_answers(batch: Mapping[str, torch.Tensor]) -> Batch:
    """Exchanges the fields with and without the prefix ``unrelated_``, and drops what the host computed from them."""
    rows = packed_text().fields
    partners = {name: UNRELATED + name for name in rows} | {UNRELATED + name: name for name in rows}
    return {name: batch[partners.get(name, name)] for name in batch if name not in (STARTS, DOCUMENTS)}


def _random_rows(generator: torch.Generator, ids: torch.Tensor) -> Batch:
    """Rows of ``ids``, (samples, seq_len), with a prompt and an answer of random lengths each, then padding."""
    samples, seq_len = ids.shape
    labels, positions = torch.full_like(ids, IGNORE_INDEX), torch.zeros_like(ids)
    for row in range(samples):
        length = int(torch.randint(3, seq_len + 1, (), generator=generator))
        prompt = int(torch.randint(1, length - 1, (), generator=generator))
        labels[row, prompt - 1 : length - 1] = ids[row, prompt:length]
        positions[row] = torch.arange(seq_len)
        positions[row, length:] -= length
    return {"input_ids": ids, "labels": labels, "position_ids": positions}
