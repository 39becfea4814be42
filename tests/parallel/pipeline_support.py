"""Pipelines of tiny models on real processes, and the one process that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.architectures.formulas.pipeline_schedules import layer_costs
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise, materialise_buffers, recipe_of
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.local_shards import fill_parameters, layouts_of
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.pipeline.run_pipeline import Pipeline, PipelinePlan
from tests.support.tiny import MODELS, SEQ_LEN, step_batch

CPU = torch.device("cpu")
SEED = 5


def model_of(name: str, layers: int, **fields: Any) -> ModelConfig:
    model = copy.deepcopy(MODELS[name])
    model.config["n_layer" if name == "gpt2" else "num_hidden_layers"] = layers
    model.config.update(fields)
    return model


def whole_model(model: ModelConfig) -> Any:
    built = build_meta(model)
    materialise(built, SEED, CPU)
    return built


def objective_of(model: Any, chunk: int = 7) -> CausalLMObjective:
    return CausalLMObjective(model, None, lambda step: 1.0, chunk)


def build(model: ModelConfig, schedule: str, by_hand: list[int] | None = None, chunk: int = 7) -> tuple[Any, Pipeline]:
    """This rank's model, cut and filled with its part of the one-process model, and its pipeline."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = PipelinePlan.make(schedule, ranks, layer_costs(resolved_fields(model), SEQ_LEN), by_hand)
    built = build_meta(model)
    objective = objective_of(built, chunk)
    views = plan.cut(built, rank)
    values = dict(whole_model(model).named_parameters())
    fill_parameters(built, lambda name, part: values[name].detach().clone(), CPU)
    materialise_buffers(built, recipe_of(built), CPU)
    assert dist.group.WORLD is not None
    return built, Pipeline(plan, views, dist.group.WORLD, CPU, objective)


def gradients_of(model: Any) -> dict[str, tuple[str, bool, torch.Tensor]]:
    """By local name: the whole model's name, whether it is owned, and the gradient."""
    layouts = layouts_of(model)
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layout = layouts.get(name)
            found[name] = (layout.name if layout else name, layout is None or layout.owned, parameter.grad.clone())
    return found


def expected(
    model: ModelConfig, steps: int = 1, lr: float | None = None, micro_batch_size: int = 8, chunk: int = 0
) -> dict[str, Any]:
    """Losses, gradients of the first and of the last step, and weights after it, in one process."""
    built = whole_model(model)
    optimizer = torch.optim.AdamW(built.parameters(), lr=lr or 0.0, weight_decay=0.0)
    objective = objective_of(built, chunk)
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        one = step_batch(step, 0, 1, micro_batch_size)
        total = 0.0
        for batch in one.micro_batches:
            loss = objective.micro_batch_loss(batch)
            loss.backward(torch.full_like(loss, 1 / one.loss_denominator))
            total += loss.item()
        losses.append(total / one.loss_denominator)
        gradients.append({name: p.grad.clone() for name, p in built.named_parameters()})
        if lr is not None:
            optimizer.step()
    return {
        "losses": losses,
        "first": gradients[0],
        "last": gradients[-1],
        "weights": {name: p.detach().clone() for name, p in built.named_parameters()},
    }


def worst_error(found: list[dict[str, tuple[str, bool, torch.Tensor]]], whole: Mapping[str, torch.Tensor]) -> float:
    """The largest error of a gradient over its bound; every gradient is there, and owned once."""
    total = float(torch.stack([g.double().square().sum() for g in whole.values()]).sum().sqrt())
    owned = sorted(name for rank in found for name, mine, _ in rank.values() if mine)
    assert owned == sorted(whole)
    worst = 0.0
    for rank in found:
        for name, _, gradient in rank.values():
            bound = 1e-5 * float(whole[name].double().norm()) + 1e-7 * total
            worst = max(worst, float((gradient.double() - whole[name].double()).norm()) / bound)
    return worst
