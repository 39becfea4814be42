"""Oracle: what :class:`StepBatch` promises about a micro-batch."""

from __future__ import annotations

import torch

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.packed_text import packed_text, random_packed_text
from mgpu_pipe.topology import BatchPlan
from mgpu_pipe.verify.baseline import step_batch_of


def global_batch(
    seed: int, step: int, samples: int, seq_len: int, vocabulary: int, packed: bool = True
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1000 * step)
    return random_packed_text(generator, step, samples, seq_len, vocabulary, packed)


def test_windows_share_the_global_batch() -> None:
    batch, plan = global_batch(7, 3, 12, 32, 96), BatchPlan(12, 3, 2)
    step_batches = [step_batch_of(batch, packed_text(), 3, plan, rank) for rank in range(3)]
    for name, value in batch.items():
        parts = [micro_batch[name] for step_batch in step_batches for micro_batch in step_batch.micro_batches]
        assert torch.equal(torch.cat(parts), value)
        assert all(part.shape == (2, 32) for part in parts)
    assert {(step_batch.first_sample, step_batch.num_samples) for step_batch in step_batches} == {(36, 12)}
    assert {step_batch.loss_denominator for step_batch in step_batches} == {
        int((batch["labels"] != IGNORE_INDEX).sum())
    }


def test_labels_follow_the_inputs_inside_documents_only() -> None:
    for packed in (True, False):
        batch = global_batch(7, 0, 8, 32, 96, packed)
        ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
        valid = labels[:, :-1] != IGNORE_INDEX
        assert torch.equal(labels[:, :-1][valid], ids[:, 1:][valid])
        starts = positions[:, 1:] == 0
        assert bool((positions[:, 1:][~starts] == positions[:, :-1][~starts] + 1).all())
        assert bool((labels[:, :-1][starts] == IGNORE_INDEX).all())
        assert bool((positions[:, 0] == 0).all())
        documents = 1 + starts.sum(1)
        assert int(documents.max()) > 2 if packed else bool((documents == 2).all())  # a document and padding


def test_processes_and_micro_batches_have_unequal_numbers_of_valid_labels() -> None:
    batches = [global_batch(7, step, 8, 32, 96) for step in range(6)]
    counts = [(batch["labels"] != IGNORE_INDEX).sum(1).tolist() for batch in batches]
    assert all(len(set(row)) > 3 for row in counts)
    assert any(0 in row for row in counts)
    assert batches[0]["input_ids"].tolist() != batches[1]["input_ids"].tolist()
    assert torch.equal(global_batch(7, 2, 8, 32, 96)["labels"], batches[2]["labels"])
