"""Which elements each rank drops. Oracle: the masks themselves, as ``dropout`` draws them in every process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.parallel.random_streams import uses_dropout
from mgpu_pipe.topology import ParallelDims
from tests.support.plain_training import assembled
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tiny import SEQ_LEN
from tests.support.training import Case, trained

CASE = Case(model="gpt2", dropout=0.5, samples=4, steps=2, layers=2)
SEQUENCE: dict[str, Any] = {"options": {"sequence_parallel": True}}
Masks = list[torch.Tensor]


def drawn(case: Case, dims: ParallelDims, first_step: int = 0) -> tuple[Masks, Any]:
    """Every mask that this process draws, in order."""
    masks: Masks = []
    plain = F.dropout

    def recorded(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        kept = plain(torch.ones_like(x), p, training)
        if p > 0:
            masks.append(kept != 0)
        return x * kept

    with mock.patch.object(F, "dropout", recorded):
        outcome = trained(case, dims, first_step)
    return masks, outcome


def each(case: Case, dims: ParallelDims) -> list[tuple[Masks, Any]]:
    return run_processes(dims.world_size, drawn, case, dims)


def is_attention(mask: torch.Tensor) -> bool:
    return mask.dim() == 4


def alike(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of equal elements: 1 for one stream, about a half for independent ones."""
    return float((a == b).double().mean())


def independent(a: torch.Tensor, b: torch.Tensor) -> bool:
    return abs(alike(a, b) - 0.5) < 5 * 0.5 / a.numel() ** 0.5


def test_tensor_parallel_ranks_drop_alike_what_they_hold_whole_and_apart_what_they_hold_parts_of() -> None:
    (first, _), (second, _) = each(CASE, ParallelDims(tp=2))
    assert sum(map(is_attention, first)) == CASE.layers * CASE.steps
    for a, b in zip(first, second, strict=True):
        assert independent(a, b) if is_attention(a) else torch.equal(a, b)
    heads = [mask for mask in first if is_attention(mask)]
    assert all(independent(a, b) for i, a in enumerate(heads) for b in heads[:i])  # of layers and steps


def test_under_sequence_parallelism_tokens_are_dropped_apart() -> None:
    (first, _), (second, _) = each(replace(CASE, **SEQUENCE), ParallelDims(tp=2))
    lengths = set()
    for a, b in zip(first, second, strict=True):
        embedding = not is_attention(a) and a.shape[1] == SEQ_LEN  # a sum's parts, which are added up later
        lengths.add(a.shape[-2])
        assert torch.equal(a, b) if embedding else independent(a, b)
    assert SEQ_LEN // 2 in lengths


@pytest.mark.slow
@pytest.mark.parametrize("mode", one_in(2, [SEQUENCE, {}]))
def test_a_recomputation_drops_what_the_first_pass_did(mode: dict[str, Any]) -> None:
    """Gradients with activation checkpointing are those without."""
    dims = ParallelDims(tp=2)
    without = [outcome for _, outcome in each(replace(CASE, **mode), dims)]
    recomputed = [outcome for _, outcome in each(replace(CASE, checkpointing="full", **mode), dims)]
    assert [outcome.losses for outcome in without] == [outcome.losses for outcome in recomputed]
    expected, found = (assembled([o.gradients for o in outcomes]) for outcomes in (without, recomputed))
    assert all(torch.allclose(found[name], gradient, 1e-5, 1e-7) for name, gradient in expected.items())


@pytest.mark.parametrize(
    ("dims", "case"),
    one_in(
        2,
        [
            (ParallelDims(dp_replicate=2), {}),
            (ParallelDims(cp=2), {"drops": ("resid_pdrop",)}),
            (ParallelDims(dp_shard=2), {"zero_stage": 2}),
        ],
    ),
)
def test_ranks_of_different_samples_or_tokens_drop_apart(dims: ParallelDims, case: dict[str, Any]) -> None:
    (first, _), (second, _) = each(replace(CASE, **case), dims)
    assert first and all(independent(a, b) for a, b in zip(first, second, strict=True))


def both_ways(case: Case, dims: ParallelDims) -> tuple[Masks, Masks]:
    return drawn(case, dims)[0], drawn(replace(case, steps=1), dims, first_step=1)[0]


@pytest.mark.slow
def test_a_resumed_run_drops_what_the_uninterrupted_one_did() -> None:
    for whole, resumed in run_processes(2, both_ways, CASE, ParallelDims(tp=2)):
        assert all(torch.equal(a, b) for a, b in zip(whole[len(whole) // 2 :], resumed, strict=True))


def losses(case: Case, dims: ParallelDims) -> list[float]:
    return trained(case, dims).losses


@pytest.mark.slow
def test_tensor_parallel_dropout_has_the_mean_and_the_spread_of_one_process() -> None:
    """Losses of 40 steps without an update, beside the same without dropout."""
    case = replace(CASE, steps=40, optimizer_options={"lr": 0.0, "weight_decay": 0.0})
    exact = torch.tensor(run_processes(1, losses, replace(case, dropout=0.0), ParallelDims())[0])
    one = torch.tensor(run_processes(1, losses, case, ParallelDims())[0]) - exact
    two = torch.tensor(run_processes(2, losses, case, ParallelDims(tp=2))[0]) - exact
    error = float((one.var() / len(one) + two.var() / len(two)).sqrt())
    assert abs(float(one.mean() - two.mean())) < 4 * error
    assert 0.5 < float(two.std() / one.std()) < 2.0


class Configured(torch.nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()

        class Config:
            def to_dict(self) -> dict[str, Any]:
                return fields

        self.config = Config()


@pytest.mark.parametrize(
    ("fields", "draws"),
    [
        ({"attention_dropout": 0.1}, True),
        ({"attention_dropout": 0.0, "summary_first_dropout": 0.1}, False),  # a classification head's
        ({"router_jitter_noise": 0.1}, True),
        ({"text_config": {"attention_dropout": 0.1}}, True),
        ({"text_config": {"attention_dropout": 0.0}, "classifier_dropout": 0.1}, False),
    ],
)
def test_what_is_random_is_seen(fields: dict[str, Any], draws: bool) -> None:
    assert uses_dropout(Configured(**fields)) is draws
