"""The batches of a verification: random packed documents with uneven label masks, padding, and a masked sample.

They are made from (seed, step) alone, so that every process makes the same ones and takes its share; the number of
valid labels differs from process to process and from micro-batch to micro-batch.
"""

from __future__ import annotations

import torch

from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.parallel.randomness import step_seed
from mgpu_pipe.topology import BatchPlan

Batch = dict[str, torch.Tensor]
SHORTEST_DOCUMENT = 3


def global_batch(seed: int, step: int, samples: int, seq_len: int, vocabulary: int, packed: bool = True) -> Batch:
    """All samples of one optimizer step: int64 tensors of shape ``(samples, seq_len)`` as in :class:`StepBatch`.

    Every fourth sample ends in padding. In every third step the last sample has no valid label at all.
    """
    generator = torch.Generator().manual_seed(step_seed(seed, step, -1))

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, max(low + 1, high), (), generator=generator))

    ids = torch.randint(0, vocabulary, (samples, seq_len + 1), generator=generator)
    labels = ids[:, 1:].clone()
    positions = torch.zeros(samples, seq_len, dtype=torch.int64)
    for row in range(samples):
        padded = row % 4 == 1 or not packed
        end = draw(seq_len // 3, seq_len - 1) if padded else seq_len
        start = 0
        while start < end:
            longest = end - start
            length = draw(SHORTEST_DOCUMENT, longest + 1) if packed else longest
            length = longest if longest - length < SHORTEST_DOCUMENT else length
            positions[row, start : start + length] = torch.arange(length)
            labels[row, start + length - 1] = IGNORE_INDEX
            labels[row, start : start + draw(0, length // 2)] = IGNORE_INDEX  # a prompt carries no loss
            start += length
        positions[row, end:] = torch.arange(seq_len - end)
        labels[row, end:] = IGNORE_INDEX
    if step % 3 == 2 and samples > 2:
        labels[-1] = IGNORE_INDEX
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "position_ids": positions}


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    """``batch`` in consecutive pieces of ``size`` samples."""
    samples = batch["input_ids"].shape[0]
    return [{name: value[at : at + size] for name, value in batch.items()} for at in range(0, samples, size)]


def step_batch_of(batch: Batch, step: int, plan: BatchPlan, data_parallel_rank: int) -> StepBatch:
    """One process's share of a global batch, as the product's loader would give it."""
    share = plan.samples_per_process
    first = data_parallel_rank * share
    mine = {name: value[first : first + share] for name, value in batch.items()}
    return StepBatch(
        step=step,
        first_sample=step * plan.global_batch_size,
        num_samples=plan.global_batch_size,
        micro_batches=micro_batches(mine, plan.micro_batch_size),
        loss_denominator=int((batch["labels"] != IGNORE_INDEX).sum()),
    )
