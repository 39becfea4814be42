"""Batches, bounds and the transfer of tensors of a verification."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import WorkerError
from mgpu_pipe.objectives.packed_text import packed_text, random_packed_text
from mgpu_pipe.parallel.rank_exchange import exchange_json
from mgpu_pipe.topology import BatchPlan
from mgpu_pipe.verify.baseline import step_batch_of
from mgpu_pipe.verify.certificate import QUANTITIES, Certificate, Measurement, Worst, failures, holds, worst_of
from mgpu_pipe.verify.comparison import check_covered, fill, from_rank_0, squared_errors, whole_errors
from tests.support.processes import run_processes


def test_the_worst_is_the_one_nearest_to_or_farthest_beyond_its_bound() -> None:
    found = worst_of(
        [
            Measurement("gradient", "a", 1, 1e-6, 1e-5),
            Measurement("gradient", "b", 2, 5e-7, 1e-7),  # smaller, but five times its bound
            Measurement("loss", "rank 0", 1, 2e-6, 1e-5),
            Measurement("initial weights", "a", 0, 0.0, 0.0),
        ]
    )
    assert [(one.quantity, one.where, one.passed) for one in found] == [
        ("initial weights", "a", True),
        ("loss", "rank 0", True),
        ("gradient", "b", False),
    ]


def test_an_exact_bound_is_broken_by_anything() -> None:
    (found,) = worst_of(
        [Measurement("initial weights", "a", 0, 0.0, 0.0), Measurement("initial weights", "b", 0, 1e-30, 0.0)]
    )
    assert found.where == "b"
    assert not found.passed


def test_what_is_not_finite_fails_and_survives_json() -> None:
    (found,) = worst_of([Measurement("weights", "a", 3, float("nan"), 1e-5)])
    assert not found.passed
    assert found.as_dict()["error"] is None
    assert not Worst.from_dict(found.as_dict()).passed


def test_bf16_may_be_one_and_a_half_times_as_far_off_as_one_process() -> None:
    def of(error: float) -> Worst:
        # In the first step the one process happens to be exact; the steps count together.
        steps = ((1, 0.0), (2, 2e-3))
        (found,) = worst_of([Measurement("loss", "rank 0", step, error, 1e-5, alone) for step, alone in steps])
        return found

    single = 2e-3 / 2**0.5
    assert of(1.49 * single).passed
    assert not of(1.52 * single).passed
    assert of(1.49 * single).bound == pytest.approx(1.5 * single + 1e-5)


def test_a_quantity_that_was_not_compared_is_no_pass() -> None:
    worst = [Worst(quantity, 0.0, 1e-5, 1, "a") for quantity in QUANTITIES]
    assert holds(worst)
    assert not holds([])
    assert not holds(worst[:-1])
    assert failures(Certificate(worst[:-1], {})) == ["weights: was not compared"]


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


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(5, 4, generator=generator),
        "w/step": torch.tensor(7.0),
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(3, generator=generator).bfloat16(),
    }


def halves() -> list[LocalShard]:
    """Rank 0 has two rows of ``w``, rank 1 three; both have the scalar."""
    first, rows = ((0, 2), (2, 3))[dist.get_rank()]
    return [
        LocalShard(TensorSlice("w", (first, 0), (rows, 4)), (5, 4), torch.zeros(rows, 4)),
        LocalShard(TensorSlice("w/step", (), ()), (), torch.zeros(())),
    ]


def exchanged() -> dict[str, object]:
    full = from_rank_0(tensors() if dist.get_rank() == 0 else {})
    shards = halves()
    fill(shards, full)
    expected = {name: full[name] for name in ("w", "w/step")}
    exact = whole_errors("weights", exchange_json(squared_errors(shards, expected), None), expected)
    if dist.get_rank() == 1:
        shards[0].tensor[2, 3] += 0.5
        shards[1].tensor += 2.0
    off = whole_errors("weights", exchange_json(squared_errors(shards, expected), None), expected)
    try:
        check_covered("weights", shards[: 2 - dist.get_rank()][dist.get_rank() :], expected)
        fault = ""
    except WorkerError as error:
        fault = str(error)
    return {"full": full, "exact": exact, "off": off, "fault": fault}


def test_pieces_are_filled_from_and_compared_with_the_whole() -> None:
    for result in run_processes(2, exchanged):
        for name, tensor in tensors().items():
            assert result["full"][name].dtype == tensor.dtype
            assert torch.equal(result["full"][name], tensor)
        assert result["exact"] == {"w": 0.0, "w/step": 0.0}
        assert result["off"] == pytest.approx({"w": 0.5, "w/step": 2.0})  # the worst copy of the scalar
        assert "pieces of the weights do not make up w: 1 slices hold 8 of the 20 elements" in result["fault"]


def test_a_gradient_that_no_rank_has_counts_as_zero() -> None:
    full = {"w": torch.full((4,), 2.0)}
    assert whole_errors("gradient", [[]], full, partial=True) == {"w": 4.0}
    extra = LocalShard(TensorSlice.whole("unused", (2,)), (2,), torch.tensor([3.0, 4.0]))
    assert whole_errors("gradient", [squared_errors([extra], {})], {}, partial=True) == {"unused": 5.0}


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    full = {"w": torch.zeros(2)}
    shard = LocalShard(TensorSlice.whole("w", (2,)), (2,), torch.tensor([float("nan"), 0.0]))
    assert whole_errors("weights", [squared_errors([shard], full)], full) == {"w": float("inf")}
