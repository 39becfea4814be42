"""Oracle: the plain one-process model of tests/support/tiny.py, its loss and every gradient by DESIGN 7's bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.layout import Layout, layouts_of
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.tensor import apply_tensor_parallel
from mgpu_pipe.parallel.tensor_gradients import reduce_replicated_gradients
from tests.support.filling import assembled, fill
from tests.support.processes import run_processes
from tests.support.tiny import MODELS, plain_steps, window

CPU = torch.device("cpu")


def changed(name: str, **fields: Any) -> ModelConfig:
    return replace(MODELS[name], config={**MODELS[name].config, **fields})


CASES = {
    **{name: MODELS[name] for name in ("llama", "qwen3", "gpt2", "mixtral")},
    "odd vocabulary": changed("llama", vocab_size=101, attention_bias=True, mlp_bias=True),
    "one key-value head": changed("qwen3", num_key_value_heads=1, attention_bias=True),
    "qwen3_moe": ModelConfig(
        name="qwen3_moe", type="qwen3_moe",
        config={**MODELS["llama"].config, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
}


def oracle(config: ModelConfig) -> dict[str, Any]:
    model = build_meta(config)
    materialise(model, 5, CPU)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {**plain_steps(model, 1, 1e-4), "weights": weights}


def tensor_parallel_step(
    config: ModelConfig, weights: dict[str, torch.Tensor], sequence_parallel: bool, loss_first: bool, chunk: int
) -> dict[str, Any]:
    """One window of four micro-batches; loss, gradients and layouts of this rank."""
    model = build_meta(config)
    group = dist.group.WORLD
    assert group is not None
    objective = None
    if loss_first:
        objective = CausalLMObjective(model, None, lambda step: 1.0, chunk)
    apply_tensor_parallel(model, group, sequence_parallel=sequence_parallel)
    fill(model, weights)
    objective = objective or CausalLMObjective(model, None, lambda step: 1.0, chunk)
    step = window(0, 0, 1, 2)
    loss_sum = 0.0
    for micro_batch in step.micro_batches:
        loss = objective.micro_batch_loss(micro_batch)
        loss.backward(torch.full_like(loss, 1.0 / step.normalizer))
        loss_sum += loss.item()
    reduce_replicated_gradients(model, group)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss_sum / step.normalizer, "gradients": gradients, "layouts": dict(layouts_of(model))}


def worst(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest error of a gradient over its bound, and whose."""
    assert set(gradients) == set(expected)
    total = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    return max(
        (float((gradients[n] - g).double().norm()) / (1e-5 * float(g.double().norm()) + 1e-7 * total), n)
        for n, g in expected.items()
    )


def compare(config: ModelConfig, results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert abs(result["loss"] / expected["losses"][0] - 1) < 1e-5
    whole = assembled([(r["layouts"], r["gradients"]) for r in results])
    error, name = worst(whole, expected["gradients"])
    print(config.name, f"{error:.4f}", name)
    assert error < 1, name
    # Ranks that do not own a parameter have the same gradient of it.
    for result in results:
        for name, gradient in result["gradients"].items():
            layout: Layout = result["layouts"][name]
            if not layout.owned:
                (start, stop), *_ = layout.ranges
                assert torch.equal(gradient, results[0]["gradients"][name]) or layout.whole != gradient.shape, name


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_loss_and_every_gradient_are_those_of_one_process(case: str, size: int, sequence_parallel: bool) -> None:
    config = CASES[case]
    expected = oracle(config)
    results = run_processes(
        size, tensor_parallel_step, config, expected["weights"], sequence_parallel, size == 2, 7 if size == 2 else 0
    )
    compare(config, results, expected)
