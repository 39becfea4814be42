"""What models of the matrices learn where it is not the next token: their batches, and one process's plain losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.dpo import DPOObjective
from mgpu_pipe.objectives.masked_lm import MaskedLMObjective
from mgpu_pipe.objectives.preference_keys import DPOConfig
from mgpu_pipe.objectives.seq2seq import Seq2SeqObjective
from mgpu_pipe.objectives.sequence_classification import SequenceClassificationObjective
from mgpu_pipe.objectives.text_keys import MaskedLMConfig
from tests.support.tiny import SEQ_LEN, VOCABULARY, global_batch

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Learned:
    """One objective.

    Attributes:
        batch: all samples of a step, of (step, samples) alone.
        loss: the sum of the losses of some samples; calls the model with keyword arguments.
    """

    model_class: str
    objective: Callable[..., Any]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Callable[..., Any], Batch], torch.Tensor]


def masked_objective(model: Any, optimizer: Any, learning_rate: Any) -> MaskedLMObjective:
    return MaskedLMObjective(model, optimizer, learning_rate, MaskedLMConfig(loss_chunk_tokens=7))


def masked_batch(step: int, samples: int) -> Batch:
    """Packed documents; of every sample another share of the tokens is to be found again."""
    batch = global_batch(step, samples)
    generator = torch.Generator().manual_seed(2000 + step)
    share = torch.linspace(0.1, 0.5, samples).unsqueeze(1)
    hidden = torch.rand(samples, SEQ_LEN, generator=generator) < share
    labels = torch.where(hidden, batch["input_ids"], IGNORE_INDEX)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, VOCABULARY - 1), "labels": labels}


def masked_loss(forward: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """One document at a time."""
    losses = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, stop in pairwise(starts):
            logits = forward(input_ids=ids[None, start:stop]).logits[0].float()
            losses.append(F.cross_entropy(logits, labels[start:stop], ignore_index=IGNORE_INDEX, reduction="sum"))
    return torch.stack(losses).sum()


def classes_batch(step: int, samples: int) -> Batch:
    """Rows of random lengths, every second one a pair, one without a class."""
    generator = torch.Generator().manual_seed(3000 + step)
    ids = torch.randint(1, VOCABULARY, (samples, SEQ_LEN), generator=generator)
    lengths = torch.randint(2, SEQ_LEN + 1, (samples,), generator=generator)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    labels[step % samples] = IGNORE_INDEX
    place = torch.arange(SEQ_LEN).expand(samples, -1)
    inside = place < lengths.unsqueeze(1)
    kinds = inside & (place >= lengths.unsqueeze(1) // 2) & (torch.arange(samples).unsqueeze(1) % 2 == 0)
    return {"input_ids": ids * inside, "token_type_ids": kinds.long(), "lengths": lengths, "labels": labels}


def classes_loss(forward: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """One row at a time, without its padding."""
    losses = []
    for ids, kinds, length, label in zip(*(batch[name] for name in batch), strict=True):
        logits = forward(input_ids=ids[None, :length], token_type_ids=kinds[None, :length]).logits.float()
        losses.append(F.cross_entropy(logits, label[None], ignore_index=IGNORE_INDEX, reduction="sum"))
    return torch.stack(losses).sum()


def pairs_objective(model: Any, optimizer: Any, learning_rate: Any) -> Seq2SeqObjective:
    return Seq2SeqObjective(model, optimizer, learning_rate, 7)


def pairs_batch(step: int, samples: int) -> Batch:
    """Sources and shorter targets of random lengths, one target empty."""
    generator = torch.Generator().manual_seed(4000 + step)
    room = SEQ_LEN // 2
    ids = torch.randint(0, VOCABULARY, (samples, SEQ_LEN), generator=generator)
    labels = torch.randint(0, VOCABULARY, (samples, room), generator=generator)
    inside = torch.arange(SEQ_LEN) < torch.randint(1, SEQ_LEN + 1, (samples, 1), generator=generator)
    targets = torch.randint(1, room + 1, (samples, 1), generator=generator)
    targets[step % samples] = 0
    labels[torch.arange(room) >= targets] = IGNORE_INDEX
    return {"input_ids": ids * inside, "attention_mask": inside.long(), "labels": labels}


def pairs_loss(forward: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """One pair at a time, without padding; the model makes the decoder's inputs from the labels."""
    losses = []
    for ids, mask, labels in zip(*(batch[name] for name in batch), strict=True):
        target = labels[labels != IGNORE_INDEX]
        if len(target):
            logits = forward(input_ids=ids[None, mask == 1], labels=target[None]).logits[0].float()
            losses.append(F.cross_entropy(logits, target, reduction="sum"))
    return torch.stack(losses).sum()


BETA = 0.3


def preferences_objective(model: Any, optimizer: Any, learning_rate: Any) -> DPOObjective:
    return DPOObjective(model, optimizer, learning_rate, DPOConfig(beta=BETA, loss_chunk_tokens=7))


def preferences_batch(step: int, samples: int) -> Batch:
    """Two documents and padding a row, answers of random lengths behind a first token, one pair that counts nothing."""
    generator = torch.Generator().manual_seed(5000 + step)
    ids = torch.randint(0, VOCABULARY, (samples, SEQ_LEN + 1), generator=generator)
    place = torch.arange(SEQ_LEN)
    ends = torch.randint(2, SEQ_LEN // 2, (samples, 2), generator=generator).cumsum(1)
    document = (place >= ends[:, :1]).long() + (place >= ends[:, 1:])
    starts = torch.cat([torch.zeros(samples, 1, dtype=torch.int64), ends], 1).gather(1, document)
    last = (place + 1 == ends[:, :1]) | (place + 1 >= ends[:, 1:])
    pair = torch.arange(samples)
    pair[step % samples] = -1
    return {
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].masked_fill(last, IGNORE_INDEX),
        "position_ids": place - starts,
        "rejected": (document == 1).long(),
        "pair": pair,
        "reference": -20 * torch.rand(samples, 2, generator=generator, dtype=torch.float64),
    }


def preferences_loss(forward: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """One answer at a time."""
    losses = []
    for ids, labels, positions, _, pair, reference in zip(*batch.values(), strict=True):
        if pair < 0:
            continue
        starts = (positions == 0).nonzero().flatten().tolist()
        gains = []
        for start, stop, before in zip(starts, starts[1:], reference.float(), strict=False):
            logits = forward(input_ids=ids[None, start : stop - 1]).logits[0].float()
            gains.append(-F.cross_entropy(logits, labels[start : stop - 1], reduction="sum") - before)
        losses.append(-torch.sigmoid(BETA * (gains[0] - gains[1])).log())
    return torch.stack(losses).sum()


LEARNED = {
    "preferences": Learned("AutoModelForCausalLM", preferences_objective, preferences_batch, preferences_loss),
    "pairs": Learned("AutoModelForSeq2SeqLM", pairs_objective, pairs_batch, pairs_loss),
    "masked": Learned("AutoModelForMaskedLM", masked_objective, masked_batch, masked_loss),
    "classes": Learned(
        "AutoModelForSequenceClassification", SequenceClassificationObjective, classes_batch, classes_loss
    ),
}
"""By the name of the model in ``tests.support.tiny``."""
