"""Stages run one after the other in one process. Oracle: the whole model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.local_shards import Layout, fill_parameters, layouts_of
from mgpu_pipe.models.shard_units import decoder_blocks, sharding_units
from mgpu_pipe.parallel.pipeline.stages import cut_stages, tied_parameter
from tests.parallel.pipeline_support import CPU, gradients_of, model_of, objective_of, whole_model, worst_error
from tests.support.sampling import one_in
from tests.support.tiny import COMMON, step_batch

LOOP, V, LINE = ((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0,), (1,), (2,), (3,))
LAYERS = (range(0, 1), range(1, 3), range(3, 4), range(4, 6))
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **{"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"mlp_only_layers": [1]},
    },
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16},
    },
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
}


def family(model_type: str) -> ModelConfig:
    if model_type in ("llama", "gpt2", "qwen3", "mixtral"):
        return model_of(model_type, 6)
    fields = {**COMMON, "num_hidden_layers": 6, **EXTRA[model_type]}
    return ModelConfig(name=model_type, type=model_type, config=fields)


def parts_of(
    model: ModelConfig, ranks: tuple[tuple[int, ...], ...]
) -> tuple[list[Any], dict[int, Any], dict[int, Any]]:
    """The cut models of all ranks, filled from the whole one, their stages, and each stage's objective."""
    whole = whole_model(model)
    values = dict(whole.named_parameters())
    buffers = dict(whole.named_buffers())
    models, views, objectives = [], {}, {}
    for rank in range(len(ranks)):
        built = build_meta(model)
        objective = objective_of(built)
        cut = cut_stages(built, LAYERS, ranks, rank)
        fill_parameters(built, lambda name, part: values[name].detach().clone(), CPU)
        for prefix, module in built.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffers[f"{prefix}.{name}"]
            for name, value in list(module.__dict__.items()):
                if isinstance(value, torch.Tensor):
                    module.__dict__[name] = getattr(whole.get_submodule(prefix), name)
        models.append(built)
        views.update({view.index: view for view in cut})
        objectives.update({view.index: objective for view in cut})
    return models, views, objectives


@pytest.mark.parametrize(
    ("model_type", "ranks"), one_in(2, product(("gpt2", "llama", "mixtral", "qwen3", *EXTRA), (LINE, LOOP, V)))
)
def test_stages_one_after_the_other_are_the_whole_model(model_type: str, ranks: tuple[tuple[int, ...], ...]) -> None:
    model = family(model_type)
    one = step_batch(0, 0, 1, 8)
    batch = one.micro_batches[0]
    whole = whole_model(model)
    loss0 = objective_of(whole, 0).micro_batch_loss(batch)
    (loss0 / one.loss_denominator).backward()
    models, views, objectives = parts_of(model, ranks)
    hidden = None
    for stage in range(3):
        hidden = views[stage](hidden, objectives[stage].model_inputs(batch))
    with views[3].activate(hidden):
        loss = objectives[3].micro_batch_loss(batch)
    assert abs(float(loss.detach()) / float(loss0.detach()) - 1) < 1e-6
    (loss / one.loss_denominator).backward()
    found = [gradients_of(cut) for cut in models]
    ends = [tied_parameter(cut) for cut in models]
    tied = [parameter for end in ends if end is not None for parameter in [end[1]]]
    if tied:
        total = sum(parameter.grad for parameter in tied)
        for parameter in tied:
            parameter.grad.copy_(total)
        found = [gradients_of(cut) for cut in models]
    assert len(tied) == (2 if model_type == "gpt2" and ranks != V else 0)
    assert worst_error(found, {name: p.grad for name, p in whole.named_parameters()}) <= 1.0
    # A rank at rest shows all that it holds, under the whole model's names.
    names = {name for name, _ in whole.named_parameters()}
    assert {name for cut in models for name, _ in cut.named_parameters()} - {"lm_head.weight"} <= names
    for cut, stages in zip(models, ranks, strict=True):
        assert len(decoder_blocks(cut)) == sum(len(LAYERS[stage]) for stage in stages)
        units = [module for unit in sharding_units(cut) for module in unit.modules]
        assert all(any(True for _ in module.parameters()) for module in units)


def test_a_tied_head_on_another_rank_is_a_copy_that_is_not_owned() -> None:
    cut = [build_meta(model_of("gpt2", 6)) for _ in range(4)]
    for rank, model in enumerate(cut):
        cut_stages(model, LAYERS, LINE, rank)
    assert [tied_parameter(model) and tied_parameter(model)[0] for model in cut] == [
        "transformer.wte.weight",
        None,
        None,
        "lm_head.weight",
    ]
    assert layouts_of(cut[0]) == {}
    assert layouts_of(cut[3]) == {"lm_head.weight": Layout.uncut("transformer.wte.weight", (96, 32), owned=False)}


def test_documents_stay_apart_in_every_stage() -> None:
    """Other tokens in a row's first document change nothing in its second one."""
    _, views, objectives = parts_of(model_of("llama", 6), LINE)
    batch = step_batch(0, 0, 1, 8).micro_batches[0]
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    starts = [int((row[1:] == 0).nonzero()[0]) + 1 for row in batch["position_ids"]]
    for row, start in enumerate(starts):
        other["input_ids"][row, :start] = (other["input_ids"][row, :start] + 1) % 96
    with torch.no_grad():
        first = second = None
        for stage in range(4):
            first = views[stage](first, objectives[stage].model_inputs(batch))
            second = views[stage](second, objectives[stage].model_inputs(other))
            for row, start in enumerate(starts):
                assert torch.equal(first[row, start:], second[row, start:]), stage
                assert not torch.equal(first[row, :start], second[row, :start])


def test_a_family_that_is_not_known_to_run_in_parts_is_refused() -> None:
    model = ModelConfig(
        name="mamba", type="mamba", config={"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4}
    )
    with pytest.raises(ConfigError, match=r"strategy.pp=2: mamba cannot be cut into stages; use pp=1"):
        cut_stages(build_meta(model), (range(2), range(2, 4)), ((0,), (1,)), 0)
