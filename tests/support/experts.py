"""Tiny mixtures of experts: the one-process computation, and a cut copy filled with the same weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.build import build_meta, materialise, materialise_buffers, recipe_of
from mgpu_pipe.models.local_shards import Layout, fill_parameters, layouts_of
from mgpu_pipe.objectives.losses.cross_entropy import logits_cross_entropy
from tests.support.tiny import COMMON, MODELS, global_batch

QWEN3_MOE = ModelConfig(
    name="qwen3_moe",
    type="qwen3_moe",
    config={
        **COMMON,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
)
MIXTURES = {"mixtral": MODELS["mixtral"], "qwen3_moe": QWEN3_MOE}
SEED = 5

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]


def whole_model(name: str) -> Any:
    model = build_meta(MIXTURES[name])
    return materialise(model, SEED, "cpu")


def fill_like_whole(model: Any, name: str) -> None:
    """Give a meta ``model``, already cut, its parts of :func:`whole_model`'s weights."""
    layouts, values = layouts_of(model), dict(whole_model(name).named_parameters())
    fill_parameters(model, lambda key, tensor_slice: part_of(values[key].detach(), layouts.get(key)), "cpu")
    materialise_buffers(model, recipe_of(model), "cpu")


def part_of(whole: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    if layout is None:
        return whole
    assert tuple(whole.shape) == layout.whole
    return torch.cat([whole.narrow(layout.dim, a, b - a) for a, b in layout.ranges], layout.dim)


def batch_of(samples: int = 8, length: int | None = None) -> Batch:
    batch = global_batch(0, samples)
    return batch if length is None else {name: value[:, :length].contiguous() for name, value in batch.items()}


def share(batch: Batch, number: int, of: int) -> Batch:
    each = len(batch["labels"]) // of
    return {name: value[number * each : (number + 1) * each] for name, value in batch.items()}


def loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return logits_cross_entropy(logits, batch["labels"])


def valid_tokens(batch: Batch) -> int:
    return int((batch["labels"] != IGNORE_INDEX).sum())


def one_process(model: Any, batch: Batch) -> tuple[float, Gradients]:
    """The oracle: the whole model over the whole batch at once."""
    loss = loss_sum(model, batch) / valid_tokens(batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def summed_gradients(
    model: Any, dense: dist.ProcessGroup | None, experts: dist.ProcessGroup | None
) -> dict[str, tuple[Layout | None, torch.Tensor]]:
    """This rank's gradients, summed over the ranks that hold the same parameter but saw other tokens."""
    layouts, found = layouts_of(model), {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        group = experts if name in layouts else dense
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
        found[name] = layouts.get(name), parameter.grad
    return found


def worst_error(found: dict[str, tuple[Layout | None, torch.Tensor]], expected: Gradients) -> tuple[float, str]:
    """The largest error of a gradient over its bound, and whose; every expected one must be there."""
    assert set(found) == set(expected)
    total = float(torch.stack([g.double().square().sum() for g in expected.values()]).sum().sqrt())
    worst = (0.0, "")
    for name, (layout, gradient) in found.items():
        reference = part_of(expected[name], layout).double()
        assert gradient.shape == reference.shape, name
        bound = 1e-5 * float(reference.norm()) + 1e-7 * total
        worst = max(worst, (float((gradient.double() - reference).norm()) / bound, name))
    return worst
