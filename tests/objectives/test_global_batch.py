"""Objectives whose samples meet: two towers on 1, 2 and 4 processes, under accumulation, against plain autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.global_batch import Features, GlobalBatchObjective
from mgpu_pipe.topology import ParallelDims
from tests.support.plain_training import assembled, stock_optimizer
from tests.support.processes import run_processes
from tests.support.sampling import sampled
from tests.support.tiny import SEQ_LEN
from tests.support.training import Case, batch_of, built, filled, trained

BOUND = 1e-5


def towers(model: Any, batch: Mapping[str, torch.Tensor]) -> Features:
    """The two halves of a row, each through the model: unit vectors, one of them by a learnt temperature."""
    halves = batch["input_ids"][:, : SEQ_LEN // 2], batch["input_ids"][:, SEQ_LEN // 2 :]
    left, right = (F.normalize(model(input_ids=ids, use_cache=False).logits.float().mean(1), dim=-1) for ids in halves)
    return {"left": left * 4.0, "right": right}


def contrastive(features: Features, rows: slice | None = None) -> torch.Tensor:
    """InfoNCE in both directions, of each sample (van den Oord, Li and Vinyals 2018; Radford et al. 2021)."""
    scores = features["left"] @ features["right"].T
    own = torch.arange(len(scores))
    both = [F.cross_entropy(matrix, own, reduction="none") for matrix in (scores, scores.T)]
    return ((both[0] + both[1]) / 2)[rows or slice(None)]


class TwoTowers(GlobalBatchObjective):
    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        return towers(self.model, batch)

    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in features.items()}
            losses = contrastive(leaves, rows)
            total = losses.sum()
        if gradients:
            total.backward()
            for name, leaf in leaves.items():
                gradients[name] += cast(torch.Tensor, leaf.grad)
        return losses.detach()


CASE = Case(model="llama", samples=8, micro_batches=2, data="padded", steps=3, objective=TwoTowers)


def plain(case: Case) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """One process, one graph over the whole batch: losses and norms by step, the weights at the end."""
    model = filled(built(case), seed=case.seed)
    optimizer = stock_optimizer(case, model)
    losses, norms = [], []
    for step in range(case.steps):
        batch = batch_of(case, step)
        optimizer.zero_grad()
        loss = contrastive(towers(model, batch)).sum() / int((batch["labels"] != -100).sum())
        loss.backward()
        norms.append(float(torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


TOPOLOGIES = {
    "single": (ParallelDims(), None),
    "ddp2": (ParallelDims(dp_replicate=2), None),
    "ddp4": (ParallelDims(dp_replicate=4), None),
    "fsdp2": (ParallelDims(dp_shard=2), None),
    "hsdp": (ParallelDims(dp_replicate=2, dp_shard=2), None),
    "tp2": (ParallelDims(dp_shard=2, tp=2), None),
    "zero1": (ParallelDims(dp_shard=2), 1),
    "zero3": (ParallelDims(dp_shard=2), 3),
}


def _train(case: Case, dims: ParallelDims) -> tuple[list[float], list[float], Any]:
    outcome = trained(case, dims)
    return outcome.losses, outcome.norms, outcome.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sampled([(name,) for name in TOPOLOGIES], lambda name: name in ("ddp4", "tp2", "zero3"))
)
def test_the_loss_over_the_global_batch_is_one_processs(name: str) -> None:
    dims, zero = TOPOLOGIES[name]
    size = 1 if dims.data_parallel_size == 4 else 2
    case = replace(CASE, zero_stage=zero, micro_batches=size)
    losses, norms, weights = plain(case)
    ranks = run_processes(dims.world_size, partial(_train, case, dims))
    for reached_losses, reached_norms, _ in ranks:
        assert reached_losses == pytest.approx(losses, rel=BOUND)
        assert reached_norms == pytest.approx(norms, rel=BOUND)
    whole = assembled([shards for _, _, shards in ranks])
    difference = sum(float((whole[n] - w).double().square().sum()) for n, w in weights.items())
    assert difference**0.5 <= BOUND * sum(float(w.double().square().sum()) for w in weights.values()) ** 0.5


ENCODED: list[Features] = []


class RecordedTowers(TwoTowers):
    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        ENCODED.append(super().encode(batch))
        return ENCODED[-1]


def _encoded(case: Case, dims: ParallelDims) -> list[Features]:
    ENCODED.clear()
    trained(case, dims)
    return [{name: values.detach() for name, values in features.items()} for features in ENCODED]


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(dp_shard=2), ParallelDims(tp=2)])
def test_both_encodings_drop_the_same_elements(dims: ParallelDims) -> None:
    """In the first step, which encodes the last micro-batch again, then the first."""
    case = replace(CASE, model="gpt2", dropout=0.5, micro_batches=2, steps=1, objective=RecordedTowers)
    for first, last, last_again, first_again in run_processes(2, _encoded, case, dims):
        for name in first:
            assert not torch.equal(first[name], last[name])
            assert torch.equal(first[name], first_again[name]) and torch.equal(last[name], last_again[name])


def _evaluated(dims: ParallelDims, counts: list[int]) -> float:
    """Over all processes, of a step batch in which rank r has ``counts[r]`` samples, one a micro-batch."""
    rank, sums = dist.get_rank(), list[float]()

    def evaluate(strategy: Any) -> None:
        batch = batch_of(CASE, 100)
        mine = range(sum(counts[:rank]), sum(counts[: rank + 1]))
        parts = [{name: value[at : at + 1] for name, value in batch.items()} for at in mine]
        step_batch = StepBatch(0, 0, sum(counts), parts, 1)
        sums.append(float(strategy.sum_over_data(strategy.run_evaluation(step_batch).reshape(1))))

    trained(replace(CASE, steps=1, micro_batches=1), dims, on_start=evaluate)
    return sums[0]


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(dp_replicate=2), ParallelDims(dp_shard=2)])
def test_ranks_without_a_sample_join_the_evaluation(dims: ParallelDims) -> None:
    model = filled(built(CASE), seed=CASE.seed)
    for counts in ([3, 0], [1, 2]):
        batch = {name: value[: sum(counts)] for name, value in batch_of(CASE, 100).items()}
        with torch.no_grad():
            expected = float(contrastive(towers(model, batch)).sum())
        assert run_processes(2, _evaluated, dims, counts) == pytest.approx([expected] * 2, rel=BOUND)
