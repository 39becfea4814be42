"""Oracles: transformers' balance loss of one sequence and one layer at a time; one process over the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.losses.router_balance import RouterLoss, router_modules
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.expert.experts import apply_expert_parallel
from tests.support.experts import (
    MIXTURES,
    Batch,
    Gradients,
    batch_of,
    fill_like_whole,
    loss_sum,
    share,
    summed_gradients,
    valid_tokens,
    whole_model,
    worst_error,
)
from tests.support.processes import run_processes
from tests.support.tiny import MODELS

COEFFICIENT = 0.3
"""Large, so that the balance loss matters in every gradient."""


def labelled(samples: int = 8) -> Batch:
    """Like ``batch_of``; the last sequence has no label at all."""
    batch = batch_of(samples)
    batch["labels"][-1] = IGNORE_INDEX
    return batch


def step_batch_of(batch: Batch, micro_batches: list[Batch]) -> StepBatch:
    return StepBatch(0, 0, len(batch["labels"]), micro_batches, valid_tokens(batch))


def direct(model: Any, batch: Batch) -> torch.Tensor:
    """The sum of the loss over sequences, from transformers' function, one sequence and layer at a time."""
    outputs = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, output_router_logits=True
    )
    rows, length = batch["labels"].shape
    total = torch.zeros(())
    for logits in outputs.router_logits:
        for row, one in enumerate(logits.view(rows, length, -1)):
            valid = (batch["labels"][row : row + 1] != IGNORE_INDEX).long()
            if valid.any():
                top_k = model.config.num_experts_per_tok
                total = total + load_balancing_loss_func((one,), one.shape[1], top_k, valid)
    return total / len(outputs.router_logits)


def reference(name: str, batch: Batch) -> tuple[float, float, Gradients]:
    """Token loss, mean balance loss, and the gradients of both, in one process at once."""
    model = whole_model(name)
    auxiliary = direct(model, batch) / len(batch["labels"])
    loss = loss_sum(model, batch) / valid_tokens(batch)
    (loss + COEFFICIENT * auxiliary).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), auxiliary.item(), gradients


def stepped(objective: CausalLMObjective, step_batch: StepBatch, scale: float = 1.0) -> torch.Tensor:
    """The step batch's sum of losses; gradients accumulate as a strategy lets them."""
    total = torch.zeros((), dtype=torch.float64)
    objective.start_step(step_batch)
    for micro_batch in step_batch.micro_batches:
        loss = objective.micro_batch_loss(micro_batch)
        loss.backward(torch.full_like(loss, scale / step_batch.loss_denominator))
        total += loss.detach()
    return total


def objective_of(model: Any) -> CausalLMObjective:
    return CausalLMObjective(model, None, lambda step: 1.0, 7, COEFFICIENT)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_value_is_transformers_balance_loss_of_each_sequence(name: str) -> None:
    model, batch = whole_model(name), labelled()
    loss = RouterLoss(model, 1.0)
    with loss.collecting():
        loss_sum(model, batch)
        found = loss.sequence_sum(batch["labels"])
    expected = direct(model, batch)
    assert abs(found.item() / expected.item() - 1) < 1e-6
    top_k = model.config.num_experts_per_tok
    assert top_k < expected.item() / 7 < 2 * top_k  # even routing gives top_k; the eighth sequence counts nothing


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("micro_batch_size", [8, 2, 1])
def test_loss_and_gradients_are_the_same_for_any_cut(micro_batch_size: int, checkpointing: Any) -> None:
    batch = labelled()
    loss, auxiliary, expected = reference("mixtral", batch)
    assert auxiliary > 1
    model = whole_model("mixtral")
    apply_activation_checkpointing(model, checkpointing)
    count = 8 // micro_batch_size
    step_batch = step_batch_of(batch, [share(batch, number, count) for number in range(count)])
    total = stepped(objective_of(model), step_batch)
    # The value is the token loss alone.
    assert abs(total.item() / step_batch.loss_denominator / loss - 1) < 1e-6
    found = summed_gradients(model, None, None)
    assert worst_error(found, expected)[0] < 1
    without = whole_model("mixtral")
    stepped(CausalLMObjective(without, None, lambda step: 1.0, 7), step_batch)
    assert worst_error(summed_gradients(without, None, None), expected)[0] > 1000


def test_a_loss_scale_reaches_it_and_evaluation_leaves_it_out() -> None:
    batch = labelled()
    _, __, expected = reference("mixtral", batch)
    model = whole_model("mixtral")
    objective = objective_of(model)
    step_batch = step_batch_of(batch, [batch])
    with torch.no_grad():
        plain = objective.micro_batch_loss(batch)
    total = stepped(objective, step_batch, scale=1024.0)
    assert total.item() == plain.item()
    scaled = {name: gradient * 1024 for name, gradient in expected.items()}
    assert worst_error(summed_gradients(model, None, None), scaled)[0] < 1


def test_attached_to_an_output_it_gives_the_same_gradients() -> None:
    batch = labelled()
    _, __, expected = reference("mixtral", batch)
    model = whole_model("mixtral")
    loss = RouterLoss(model, COEFFICIENT)
    loss.start_step(valid_tokens(batch), 8)
    with loss.collecting():
        output = loss.attach_to(loss_sum(model, batch), batch["labels"], 1.0)
    output.backward(torch.full_like(output, 1 / valid_tokens(batch)))
    assert worst_error(summed_gradients(model, None, None), expected)[0] < 1


def _expert_parallel() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = labelled()
    loss, _, expected = reference("qwen3_moe", batch)
    model = build_meta(MIXTURES["qwen3_moe"])
    objective = objective_of(model)
    apply_expert_parallel(model, dist.group.WORLD)
    apply_activation_checkpointing(model, "full")
    fill_like_whole(model, "qwen3_moe")
    mine = share(batch, rank, world)
    step_batch = step_batch_of(batch, [share(mine, number, 2) for number in range(2)])
    total = stepped(objective, step_batch)
    dist.all_reduce(total)
    found = summed_gradients(model, dist.group.WORLD, None)
    return {"worst": worst_error(found, expected), "loss": abs(total.item() / step_batch.loss_denominator / loss - 1)}


def test_it_is_the_same_with_experts_on_two_ranks() -> None:
    for result in run_processes(2, _expert_parallel):
        assert result["loss"] < 1e-5 and result["worst"][0] < 1, result


def position_wise(model: Any) -> Any:
    """Without attention a token's result depends on no other token, so that sequences can be cut by hand."""
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    return model


def _cut_sequences(kind: str) -> dict[str, Any]:
    """Each of two ranks has one half of every sequence, by context or by sequence parallelism."""
    rank, batch = dist.get_rank(), labelled()
    world = dist.group.WORLD
    expected_model = position_wise(whole_model("mixtral"))
    stepped(objective_of(expected_model), step_batch_of(batch, [batch]))
    expected = {n: p.grad for n, p in expected_model.named_parameters() if p.grad is not None}
    model = position_wise(whole_model("mixtral"))
    loss = RouterLoss(model, COEFFICIENT)
    loss.start_step(valid_tokens(batch), 8)
    half = {name: value.chunk(2, dim=1)[rank] for name, value in batch.items()}
    if kind == "context":
        loss.reduce_over([world])
    else:
        loss.reduce_over([], world)
    with loss.collecting():
        # A sequence-parallel rank knows all labels, and its routers see its own range of the tokens.
        total = loss.add_to(loss_sum(model, half), half["labels"] if kind == "context" else batch["labels"])
    total.backward(torch.full_like(total, 1 / valid_tokens(batch)))
    return {"worst": worst_error(summed_gradients(model, world, None), expected)}


@pytest.mark.parametrize("kind", ["context", "sequence"])
def test_sequences_cut_over_ranks_count_as_whole_ones(kind: str) -> None:
    for result in run_processes(2, _cut_sequences, kind):
        assert result["worst"][0] < 1, result


def test_a_model_without_routers_is_refused_and_every_layer_of_a_mixture_has_one() -> None:
    assert len(router_modules(build_meta(MODELS["mixtral"]))) == 2
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routers"):
        RouterLoss(build_meta(MODELS["llama"]), 0.1)
