"""ORPO, SimPO and CPO. Oracle: the formulas of their papers, over transformers' own model, one answer at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.preference_keys import CPOConfig, ORPOConfig, SimPOConfig
from mgpu_pipe.objectives.preference_pairs import CPOObjective, ORPOObjective, SimPOObjective
from tests.models.tiny import tiny_model
from tests.objectives.harness import answers_config, learnt_metrics


def made(weight: float = 0.3) -> ORPOObjective:
    model = materialise(build_meta(tiny_model("llama")), 2, "cpu")
    return ORPOObjective(model, None, lambda step: 1.0, ORPOConfig(odds_weight=weight))


def answers_of(model: Any, batch: dict[str, torch.Tensor], row: int) -> list[torch.Tensor]:
    """Log-probabilities of the tokens of the chosen and of the rejected answer, each read alone."""
    found, starts = [], (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
    ends = [starts[1], starts[1] + int(batch["rejected"][row].sum())]
    for start, stop in zip(starts[:2], ends, strict=True):
        labels = batch["labels"][row, start:stop]
        shares = model(input_ids=batch["input_ids"][row, None, start:stop]).logits[0].log_softmax(-1)
        places = (labels != -100).nonzero().flatten()
        found.append(shares[places, labels[places]])
    return found


def simpo(beta: float = 1.5, margin: float = 0.4) -> SimPOObjective:
    model = materialise(build_meta(tiny_model("llama")), 2, "cpu")
    return SimPOObjective(model, None, lambda step: 1.0, SimPOConfig(beta=beta, margin=margin))


def cpo() -> CPOObjective:
    model = materialise(build_meta(tiny_model("llama")), 2, "cpu")
    return CPOObjective(model, None, lambda step: 1.0, CPOConfig(beta=0.2, chosen_weight=0.7, label_smoothing=0.1))


def cpo_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    margin = 0.2 * (chosen.sum() - rejected.sum())
    preference = 0.9 * torch.log1p((-margin).exp()) + 0.1 * torch.log1p(margin.exp())
    return preference - 0.7 * chosen.mean(), margin


def orpo_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = chosen.mean(), rejected.mean()
    log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen + 0.3 * -torch.sigmoid(log_odds).log(), log_odds


def simpo_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    reward = 1.5 * chosen.mean() - 1.5 * rejected.mean()
    return -torch.sigmoid(reward - 0.4).log(), reward


@pytest.mark.parametrize(("build", "formula"), [(made, orpo_loss), (simpo, simpo_loss), (cpo, cpo_loss)])
def test_loss_gradients_and_metrics_are_those_of_the_paper(build: Any, formula: Any) -> None:
    objective = build()
    model: Any = objective.model
    batch = objective.random_batch(3, 2, 5, 48, packed=True)
    assert batch["pair"].tolist() == [0, 1, 2, 3, -1], "the last pair counts nothing"
    losses, ratios, chosen_losses = [], [], []
    for row in range(4):
        chosen, rejected = answers_of(model, batch, row)
        loss, ratio = formula(chosen, rejected)
        losses.append(loss)
        ratios.append(float(ratio.detach()))
        chosen_losses.append(-float(chosen.detach().mean()))
    expected = torch.stack(losses).sum()
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = objective.micro_batch_loss(batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6), name
    sums = objective.evaluation_sums(batch).tolist()
    right = sum(ratio > 0 for ratio in ratios)
    assert sums == pytest.approx([float(expected.detach()), right, sum(chosen_losses), sum(ratios)], rel=1e-5)


@pytest.mark.parametrize("build", [made, simpo, cpo])
def test_what_counts_nothing_or_is_certain_has_finite_gradients(build: Any) -> None:
    objective = build()
    empty = objective.batch_spec.empty(16, torch.device("cpu"))
    objective.micro_batch_loss(empty).backward()
    gradients = [parameter.grad for parameter in objective.model.parameters()]
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    batch = objective.random_batch(3, 0, 4, 48, packed=True)
    head: Any = objective.model.get_output_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        head.weight.zero_()
    head.bias = torch.nn.Parameter(torch.eye(len(head.weight))[0] * 100)  # token 0 is certain
    batch["input_ids"].zero_()
    batch["labels"][batch["labels"] != -100] = 0
    loss = objective.micro_batch_loss(batch)
    loss.backward()
    assert torch.isfinite(loss) and all(
        p.grad is not None and torch.isfinite(p.grad).all() for p in objective.model.parameters()
    )


small_data = partial(answers_config, "orpo")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_learns_and_goes_on_under_another_strategy(tmp_path: Path) -> None:
    whole, longer = learnt_metrics(small_data, tmp_path)
    assert longer["val/loss"] < 0.9 * whole["val/loss"]
    assert longer["val/loss"] > longer["val/chosen_loss"] > 0
