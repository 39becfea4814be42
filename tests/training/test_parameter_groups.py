"""Which parameters belong to which group, and what is refused."""

from __future__ import annotations

import pytest
import torch

from mgpu_pipe.config.group_keys import OptimizerConfig, ParameterGroup
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.optim.groups import treatments
from mgpu_pipe.optim.optimizers import optimizer_factory
from tests.models.tiny import tiny_model


def model_of(family: str) -> torch.nn.Module:
    return build_meta(tiny_model(family), "AutoModelForSeq2SeqLM" if family == "t5" else None)


def test_a_parameter_belongs_to_the_first_group_that_names_it() -> None:
    groups = {
        "a": ParameterGroup(["*.q_proj.weight"], lr=1.0),
        "b": ParameterGroup(["*.self_attn.*"], weight_decay=0.5),
    }
    found = treatments(model_of("llama"), OptimizerConfig(groups=groups, weight_decay=0.1))
    assert {treated.lr for name, treated in found.items() if "q_proj" in name} == {1.0}
    assert {(t.lr, t.weight_decay) for name, t in found.items() if "k_proj" in name} == {(None, 0.5)}
    assert {(t.lr, t.weight_decay) for name, t in found.items() if "self_attn" not in name} == {(None, 0.1)}


@pytest.mark.parametrize(
    ("family", "powers"),
    [
        (
            "llama",
            {"model.embed_tokens.": 3, "model.layers.0.": 2, "model.layers.1.": 1, "model.norm.": 0, "lm_head.": 0},
        ),
        ("gpt2", {"transformer.wpe.": 3, "transformer.h.0.": 2, "transformer.h.1.": 1, "transformer.ln_f.": 0}),
        ("t5", {"shared.": 3, "encoder.block.0.": 2, "decoder.block.0.": 2, "decoder.block.1.": 1, "encoder.final": 0}),
    ],
)
def test_layer_wise_decay_counts_from_the_top_of_each_tower(family: str, powers: dict[str, int]) -> None:
    found = treatments(model_of(family), OptimizerConfig(layer_decay=0.5))
    for start, power in powers.items():
        factors = {treated.lr_factor for name, treated in found.items() if name.startswith(start)}
        assert factors == {0.5**power}, start


def test_a_tied_weight_is_treated_alike_under_each_of_its_names() -> None:
    """A pipeline holds a copy of it on its first and on its last rank."""
    head = {"head": ParameterGroup(["lm_head.weight", "*wte*"], lr=1.0)}
    found = treatments(model_of("gpt2"), OptimizerConfig(groups=head))
    assert found["lm_head.weight"] == found["transformer.wte.weight"] and found["lm_head.weight"].lr == 1.0


def test_muons_matrices_and_the_rest_keep_their_own_rates() -> None:
    model = model_of("llama")
    late = {"late": ParameterGroup(["model.layers.0.*"], frozen_until=5)}
    config = OptimizerConfig(
        _target_="mgpu_pipe.optim.muon.Muon", lr=0.02, layer_decay=0.5, groups=late, options={"adamw_lr": 1e-3}
    )
    groups = optimizer_factory(config, model)(model).param_groups
    rates = {id(p): (group["lr"], group.get("frozen_until", 0)) for group in groups for p in group["params"]}
    named = {name: rates[id(p)] for name, p in model.named_parameters()}
    assert named["model.layers.0.mlp.up_proj.weight"] == (0.02 / 4, 5)
    assert named["model.layers.0.input_layernorm.weight"] == (1e-3 / 4, 5)
    assert named["model.layers.1.mlp.up_proj.weight"] == (0.02 / 2, 0)
    assert named["lm_head.weight"] == (1e-3, 0)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"a": ParameterGroup(["model.layer.*"])},
            r"optimizer\.groups\.a\.parameters=model\.layer\.\*: matches no parameter",
        ),
        ({"a": ParameterGroup()}, r"optimizer\.groups\.a\.parameters=\[\]: the group names no parameter"),
        ({"a": ParameterGroup(["*"]), "b": ParameterGroup(["lm_head.*"])}, r"groups\.b\..*belongs to a group above"),
    ],
)
def test_a_group_without_parameters_is_refused(groups: dict[str, ParameterGroup], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        treatments(model_of("llama"), OptimizerConfig(groups=groups))
