"""A pipeline's stages one after the other in one process, against the whole model."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.local_shards import layouts_of
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.pipeline.stages import StageParts, cut_stages
from tests.families.cells import SEQ_LEN
from tests.families.step import Tensors, error, isolates, steps, ways, whole_model
from tests.support.filling import fill

STAGES = 4
RANKS = ((0, 2), (1, 3))
"""The stages of each rank."""


def stages_error(config: ModelConfig) -> tuple[float, str]:
    """The largest error over its bound of a model of at least as many layers as stages, and of what."""
    whole = whole_model(config)
    fix_rotary_length(whole, SEQ_LEN)
    way = "packed, both at once" if isolates(config) else "padded, three at once"
    (batch,) = ways(config, isolates(config))[way][:1]
    loss, gradients = steps(whole, [batch])
    blocks = len(whole.get_submodule(StageParts.from_model(whole, len(RANKS)).layers))
    ends = [round(blocks * stage / STAGES) for stage in range(STAGES + 1)]
    layers = tuple(range(start, stop) for start, stop in itertools.pairwise(ends))
    values = {name: p.detach() for name, p in whole.named_parameters(remove_duplicate=False)}
    models, views, objectives = [], {}, {}
    for rank in range(len(RANKS)):
        model = build_meta(config)
        fix_rotary_length(model, SEQ_LEN)
        objective = CausalLMObjective(model, None, lambda step: 1.0, 0)
        for view in cut_stages(model, layers, RANKS, rank):
            views[view.index], objectives[view.index] = view, objective
        fill(model, values)
        models.append(model)
    hidden = None
    for stage in range(STAGES - 1):
        hidden = views[stage](hidden, objectives[stage].model_inputs(batch))
    with views[STAGES - 1].activate(hidden):
        total = objectives[STAGES - 1].micro_batch_loss(batch)
    count = int((batch["labels"] >= 0).sum())
    (total / count).backward()
    return error((float(total) / count, _summed(models)), {"loss": loss, "gradients": gradients})


def _summed(models: list[Any]) -> Tensors:
    """Gradients by the whole model's names; of a tied weight that two ranks hold, their sum."""
    found: Tensors = {}
    for model in models:
        layouts = layouts_of(model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                whole = layouts[name].name if name in layouts else name
                found[whole] = found.get(whole, torch.zeros(())) + parameter.grad
    return found
