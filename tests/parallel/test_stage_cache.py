"""A pipeline generates with keys and values of earlier tokens. Oracle: one process, with its own cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.inference.generation import generation_mode
from mgpu_pipe.parallel.pipeline.stages import can_cache_stages
from mgpu_pipe.training.mesh import pipeline_forward
from mgpu_pipe.training.strategy import SamplingForward
from tests.parallel.pipeline_support import build, model_of, objective_of, whole_model
from tests.parallel.test_pipeline import FAMILIES, small
from tests.support.processes import run_processes
from tests.support.tiny import COMMON, VOCABULARY

PROMPTS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(4))
MASK = torch.ones_like(PROMPTS)
MASK[1, :4] = 0
NEW = 12
SLIDING = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 6}),
    "both": ("qwen3", {"head_dim": 8, "sliding_window": 6, "use_sliding_window": True, "layer_types": SLIDING * 2}),
}


def config_of(name: str) -> ModelConfig:
    if name in FAMILIES:
        return small(name)
    kind, more = MODELS[name]
    if kind == "mistral":
        return ModelConfig(name=kind, type=kind, config={**COMMON, "num_hidden_layers": 4, **more})
    return model_of(kind, 4, **more)


def generate(model: Any, forward: SamplingForward | None) -> list[list[int]]:
    with generation_mode(model, forward):
        ids = model.generate(
            PROMPTS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, use_cache=True, pad_token_id=0
        )
    return ids.tolist()


def generate_in_stages(
    name: str, schedules: tuple[str, ...] = ("1f1b", "zbv")
) -> dict[str, tuple[list[list[int]], list[int]]]:
    """Ids, and the tokens of each forward pass, by schedule."""
    found = {}
    for schedule in schedules:
        model, pipeline = build(config_of(name), schedule)
        lengths: list[int] = []

        def count(module: Any, arguments: Any, inputs: Any, lengths: list[int] = lengths) -> None:
            lengths.append(inputs["input_ids"].shape[1])

        model.register_forward_pre_hook(count, with_kwargs=True)
        forward = SamplingForward(partial(pipeline_forward, pipeline, objective_of(model)), takes_cache=True)
        found[schedule] = (generate(model, forward), lengths)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_stages_with_a_cache_continue_as_one_process_does(name: str) -> None:
    model = whole_model(config_of(name))
    assert can_cache_stages(model.config)
    expected = generate(model, None)
    for found in run_processes(2, generate_in_stages, name):
        for schedule, (ids, lengths) in found.items():
            assert ids == expected, schedule
            calls = 3 if schedule == "zbv" else 2  # generate()'s, and one a stage of this rank
            assert lengths == [PROMPTS.shape[1]] * calls + [1] * calls * (NEW - 1)


def generate_of_families(names: list[str]) -> dict[str, list[list[int]]]:
    return {name: generate_in_stages(name, ("interleaved_1f1b",))["interleaved_1f1b"][0] for name in names}


@pytest.mark.exhaustive
def test_every_family_continues_as_one_process_does() -> None:
    models = {name: whole_model(config_of(name)) for name in FAMILIES}
    cached = [name for name, model in models.items() if can_cache_stages(model.config)]
    found = run_processes(2, generate_of_families, cached)[0]
    assert len(cached) > 15 and found == {name: generate(models[name], None) for name in cached}


def test_a_model_with_states_of_another_kind_takes_whole_texts() -> None:
    from transformers import LlavaConfig, MambaConfig, T5Config

    assert not any(can_cache_stages(config) for config in (MambaConfig(), LlavaConfig(), T5Config()))
