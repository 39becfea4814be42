"""Evaluation, generation and building under sharded strategies. Oracle: one process with the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.topology import ParallelDims
from tests.support.processes import run_processes
from tests.support.training import Case, batch_of, built, filled, trained

CASE = Case(model="llama", steps=1)


def evaluated(dims: ParallelDims, counts: list[int]) -> float:
    """The sum of losses over all processes of a step batch in which rank r has ``counts[r]`` samples, one a
    micro-batch.
    """
    rank = dist.get_rank()
    found: list[float] = []

    def evaluate(strategy: Any) -> None:
        batch = batch_of(CASE, 100)
        first = sum(counts[:rank])
        mine = range(first, first + counts[rank])
        parts = [{name: value[at : at + 1] for name, value in batch.items()} for at in mine]
        loss_denominator = int((batch["labels"] != IGNORE_INDEX).sum())
        step_batch = StepBatch(0, 0, sum(counts), parts, loss_denominator)
        total = strategy.sum_over_data(strategy.run_evaluation(step_batch).reshape(1))
        found.append(float(total))
        assert {shard.tensor.dtype for shard in strategy.model_shards()} == {torch.float32}

    trained(CASE, dims, on_start=evaluate)
    return found[0]


def whole_sum(samples: int) -> float:
    model = filled(built(CASE))
    batch = {name: value[:samples] for name, value in batch_of(CASE, 100).items()}
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    labels = batch["labels"].flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return float(loss)


@pytest.mark.slow
def test_ranks_with_fewer_samples_or_none_join_the_evaluation() -> None:
    for dims in (ParallelDims(dp_shard=4), ParallelDims(dp_replicate=2, dp_shard=2)):
        for counts in ([2, 1, 0, 2], [0, 0, 0, 1], [1, 1, 1, 1]):
            expected = whole_sum(sum(counts))
            for value in run_processes(4, evaluated, dims, counts):
                assert abs(value / expected - 1) < 1e-6


def generated(dims: ParallelDims) -> list[int]:
    found: list[list[int]] = []

    def generate(strategy: Any) -> None:
        model = strategy.objective.model.eval()
        given = torch.arange(5)[None]
        with torch.no_grad():
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=6,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                synced_gpus=dims.dp_shard > 1,
            )
        found.append(made[0].tolist())
        model.train()

    trained(CASE, dims, on_start=generate)
    return found[0]


def test_all_ranks_generate_together_what_one_generates() -> None:
    (expected,) = run_processes(1, generated, ParallelDims())
    assert len(expected) == 11
    assert run_processes(4, generated, ParallelDims(dp_shard=4)) == [expected] * 4
