"""Direct preference optimisation: of two answers the chosen one is to gain on the rejected one, against a reference.

A sample is a pair, one packed row of two documents: the conversation with the chosen answer, then that with the
rejected one. So one forward pass sees both, no rank or micro-batch splits a pair, and what can be done with packed rows
can be done with pairs. Losses as in Rafailov et al. 2023 (arXiv:2305.18290), Mitchell 2023 (label smoothing) and Azar
et al. 2023 (arXiv:2310.12036, with means over the answers' tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.batch_spec import BatchSpec, Field
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.adapters.lora import without_adapters
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.dpo_keys import DESCRIPTION, DPOConfig
from mgpu_pipe.objectives.first_weights import RunStart
from mgpu_pipe.objectives.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import packed_text
from mgpu_pipe.objectives.pair_reference import PairReference
from mgpu_pipe.objectives.router_loss import SummedOverRanks
from mgpu_pipe.parallel.randomness import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTHING = -1
"""The number of a pair that counts nothing."""
CHOSEN, REJECTED = 0, 1
"""Columns of what there are two of."""


class DPOObjective(Objective):
    """The preference of chosen over rejected answers under a Hugging Face causal language model.

    Args:
        keys: ``objective.*``.
    """

    description = DESCRIPTION
    num_sums = 8

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: DPOConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._keys = keys
        self._loss = TokenLoss(model, keys.loss_chunk_tokens)
        self._reference = PairReference()
        self._sequences: dist.ProcessGroup | None = None

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        return cls(model, optimizer_factory, learning_rate, cast(DPOConfig, config.objective))

    @property
    def batch_spec(self) -> BatchSpec:
        """Packed rows, of a pair each, and for the last stage: ``rejected``, 1 where a token is of the second document;
        ``pair``, int64 (rows,), the pair's number in its set; ``reference``, float64 (rows, 2), the sums of the
        reference's log-probabilities over the chosen and the rejected answer."""
        packed = packed_text()
        fields = {
            **packed.fields,
            "labels": replace(packed.fields["labels"], target=False),
            "rejected": Field(stages="last"),
            "pair": Field(sequence_dim=None, padding=NOTHING, target=True, stages="last"),
            "reference": Field(sequence_dim=None, dtype="float64", shape=(2,), stages="last"),
        }
        return replace(packed, fields=fields)

    def share_sequences(self, groups: Sequence[dist.ProcessGroup], along: dist.ProcessGroup | None) -> None:
        for group in groups:
            self._sequences = group

    sampling_batch = CausalLMObjective.sampling_batch
    row_losses = CausalLMObjective.row_losses

    # -- the reference ------------------------------------------------------------------------------------------

    def needs_first_weights(self, start: RunStart) -> bool:
        return self._keys.reference == "cached" and not self._reference.load(start)

    def first_weights(self, start: RunStart) -> None:
        self._reference.measure(start, self.trainer.strategy, self)

    def of_run(self, start: RunStart) -> None:
        if self.needs_first_weights(start):
            kept = f"{start.folder}/{start.file}"
            raise BadInputError(
                f"{kept}: no such numbers of the reference for these pairs; evaluate the run's own data"
            )

    def training_step(self, step_batch: StepBatch, batch_idx: int) -> dict[str, Any]:
        return super().training_step(self._reference.added(step_batch, "train"), batch_idx)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        super().validation_step(self._reference.added(step_batch, "validation"), batch_idx)

    # -- the loss -----------------------------------------------------------------------------------------------

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._counted_once(self._of_pairs(batch)[0].sum())

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        losses, rewards, said, said_before = self._of_pairs(batch)
        right = rewards[:, CHOSEN] > rewards[:, REJECTED]
        sums = [losses.sum(0, True), right.sum(0, True), rewards.sum(0), said.sum(0), said_before.sum(0)]
        return self._counted_once(torch.cat(sums).double())

    def _of_pairs(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Each pair's loss, (rows,), and of its two answers, (rows, 2), the rewards and the probabilities, now and
        under the reference; 0 where it counts nothing."""
        if self._keys.reference == "live":
            with torch.no_grad(), without_adapters(self.model):
                reference, _ = self._answers(batch)
        else:
            reference = batch["reference"] if "reference" in batch else self._reference.of(batch, "validation")
        found, tokens = self._answers(batch)
        self._reference.note(batch["pair"], found)
        counts = batch["pair"] != NOTHING
        losses, rewards = preference_losses(found, reference, tokens, self._keys)
        of_answers = (rewards, found.detach().exp(), reference.exp())
        return losses.where(counts, 0.0), *[value.where(counts.unsqueeze(1), 0.0) for value in of_answers]

    def _answers(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probability of each pair's two answers, and their tokens; float64 (rows, 2)."""
        labels, rejected = batch["labels"], batch["rejected"] == 1
        of_tokens = -self._loss.by_token(self.model_inputs(batch), labels).double()
        counts = (labels != IGNORE_INDEX).double()
        sums = torch.stack(
            [(value * side).sum(1) for value in (of_tokens, counts) for side in (~rejected, rejected)], dim=1
        )
        if self._sequences is not None:
            sums = SummedOverRanks.apply(sums, self._sequences)
        return sums[:, :2], sums[:, 2:]

    def _counted_once(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, which all ranks that share the sequences have; zero on all but one, with the same gradient."""
        first = self._sequences is None or self._sequences.rank() == 0
        return value if first else value - value.detach()

    # -- verification -------------------------------------------------------------------------------------------

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Pairs of uneven answers behind a common prompt; in every third step the last one counts nothing."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        vocabulary = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        ids = torch.randint(0, vocabulary, (samples, seq_len), generator=generator)
        labels = torch.full_like(ids, IGNORE_INDEX)
        positions, rejected = torch.zeros_like(ids), torch.zeros_like(ids)
        reference = -torch.rand(samples, 2, generator=generator, dtype=torch.float64)
        for row in range(samples):
            lengths = torch.randint(3, seq_len // 2 + 1, (2,), generator=generator).tolist()
            prompt = int(torch.randint(1, min(lengths) - 1, (), generator=generator))
            ids[row, lengths[0] : lengths[0] + prompt] = ids[row, :prompt]
            start = 0
            for side, length in enumerate([*lengths, seq_len - sum(lengths)]):
                stop = start + length
                positions[row, start:stop] = torch.arange(length)
                if side <= REJECTED:
                    labels[row, start + prompt - 1 : stop - 1] = ids[row, start + prompt : stop]
                    rejected[row, start:stop] = side
                    reference[row, side] -= (length - prompt) * float(torch.tensor(vocabulary).log())
                start = stop
        pair = torch.arange(samples)
        if step % 3 == 2 and samples > 2:
            pair[-1] = NOTHING
        given = {
            "labels": labels,
            "position_ids": positions,
            "rejected": rejected,
            "pair": pair,
            "reference": reference,
        }
        return {"input_ids": ids, **given}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One answer at a time, by the formulas of the papers."""
        losses = []
        for row in range(len(batch["pair"])):
            if int(batch["pair"][row]) == NOTHING:
                continue
            starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()[:2]
            ends = [starts[1], starts[1] + int(batch["rejected"][row].sum())]
            gained = []
            for side, (start, stop) in enumerate(zip(starts, ends, strict=True)):
                labels = batch["labels"][row, start:stop]
                logits = forward(input_ids=batch["input_ids"][row, None, start:stop]).logits[0].float()
                answer = -F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
                before = batch["reference"][row, side].to(answer.dtype)
                if self._keys.reference == "live":
                    with torch.no_grad(), without_adapters(model):
                        plain = forward(input_ids=batch["input_ids"][row, None, start:stop]).logits[0].float()
                    before = -F.cross_entropy(plain, labels, ignore_index=IGNORE_INDEX, reduction="sum")
                gain = answer - before
                gained.append(gain / int((labels != IGNORE_INDEX).sum()) if self._keys.loss == "ipo" else gain)
            losses.append(self._plain_loss(gained[CHOSEN] - gained[REJECTED]))
        return Reference(torch.stack(losses).sum())

    def _plain_loss(self, margin: torch.Tensor) -> torch.Tensor:
        beta, flipped = self._keys.beta, self._keys.label_smoothing
        if self._keys.loss == "ipo":
            return (margin - 0.5 / beta) ** 2
        wins = torch.sigmoid(beta * margin)
        return -(1 - flipped) * wins.log() - flipped * (1 - wins).log()


def preference_losses(
    found: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor, keys: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each pair's loss, (rows,), and its answers' rewards, (rows, 2).

    Args:
        found, reference: the answers' log-probabilities, float64 (rows, 2).
        tokens: of the answers, (rows, 2).
    """
    gains = found - reference
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
