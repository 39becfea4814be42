"""Optimizers: refusals, groups of parameters, probes and schedules. Oracles: torch and the cited papers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from mgpu_pipe.checks.optimizer import ELEMENTWISE, STATE_AT_START
from mgpu_pipe.config.group_keys import OptimizerConfig, ParameterGroup
from mgpu_pipe.config.schema import SchedulerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.optim.optimizers import build_schedule, optimizer_factory, treatments
from mgpu_pipe.optim.probe import probe
from tests.models.tiny import tiny_model


def build(**fields: object) -> torch.optim.Optimizer:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    return optimizer_factory(OptimizerConfig(**fields), model)(model)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"options": {"betas": [2, 3]}}, "Invalid beta parameter at index 0: 2; change optimizer.options"),
        ({"_target_": "torch.optim.SGD", "options": {"nesterov": True}}, "Nesterov momentum requires a momentum"),
        ({"_target_": "torch.optim.LBFGS", "weight_decay": 0.0}, "evaluates the loss itself"),
    ],
)
def test_a_refusal_is_one_line_of_the_key(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\._target_=torch\.optim\.") as refused:
        build(**fields)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_vectors_are_not_decayed_unless_asked() -> None:
    decays = {group["weight_decay"]: len(group["params"]) for group in build(weight_decay=0.1).param_groups}
    assert decays == {0.1: 1, 0.0: 3}
    assert len(build(weight_decay=0.1, decay_norms_and_biases=True).param_groups) == 1


@pytest.mark.parametrize(
    "fields", [{}, {"decay_norms_and_biases": True}, {"_target_": "torch.optim.Rprop", "weight_decay": 0.0}]
)
def test_a_rank_that_trains_nothing_has_an_optimizer_too(fields: dict[str, object]) -> None:
    frozen = torch.nn.Linear(3, 2).requires_grad_(False)
    optimizer = optimizer_factory(OptimizerConfig(**fields), frozen)(frozen)
    optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == [[]]


def factors(total: int, **fields) -> list[float]:
    schedule = build_schedule(SchedulerConfig(**fields), total)
    return [schedule(step) for step in range(total + 3)]


def test_warm_up_is_linear_and_reaches_the_peak():
    assert factors(10, name="constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(10, name="cosine", warmup_ratio=0.31) == factors(10, name="cosine", warmup_steps=4)
    assert factors(10, name="cosine", warmup_ratio=0.0) == factors(10, name="cosine")


def test_cosine_is_half_way_at_half_time_and_keeps_its_floor_beyond_the_horizon():
    found = factors(100, name="cosine", min_lr_ratio=0.2)
    assert found[0] == 1.0
    assert math.isclose(found[50], 0.6)
    assert found[100] == found[102] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(found))


def test_linear_falls_evenly_after_the_warm_up():
    found = factors(12, name="linear", warmup_steps=2, min_lr_ratio=0.0)
    steps = [a - b for a, b in pairwise(found[2:13])]
    assert all(math.isclose(step, 0.1) for step in steps)


def test_wsd_is_stable_until_its_last_steps():
    found = factors(20, name="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    assert set(found[2:17]) == {1.0}
    assert found[17:21] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert factors(20, name="wsd", min_lr_ratio=0.0)[18:21] == pytest.approx([1.0, 0.5, 0.0])


def test_a_warm_up_longer_than_the_horizon_takes_all_of_it_and_reaches_the_peak():
    for name in ("constant", "linear", "cosine", "wsd"):
        found = factors(4, name=name, warmup_steps=10)
        assert found[:4] == [0.25, 0.5, 0.75, 1.0]
        assert found == factors(4, name=name, warmup_steps=4)
    assert factors(100, name="cosine", warmup_steps=10) != factors(4, name="cosine", warmup_steps=10)


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


OWN = "tests.support.own_optimizers."
TORCHS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


@pytest.mark.parametrize("name", TORCHS)
def test_every_optimizer_of_torch_is_what_the_table_says(name: str) -> None:
    found = probe(f"torch.optim.{name}", 1e-2, 0.0, {})
    assert (found.scope == "element") == (name in ELEMENTWISE)
    assert found.state_at_start == (name in STATE_AT_START)
    if name not in ELEMENTWISE and name != "Adafactor":
        assert found.refusal is not None


@pytest.mark.parametrize(
    ("name", "scope", "in_place", "at_start"),
    [
        ("Counting", "element", False, False),
        ("Lion", "element", True, False),
        ("Early", "element", True, True),
        ("ByNorm", "tensor", True, False),
        ("Clipping", "model", True, False),
    ],
)
def test_how_far_a_users_optimizer_looks_is_found_out(name: str, scope: str, in_place: bool, at_start: bool) -> None:
    found = probe(OWN + name, 1e-2, 0.01, {})
    assert (found.refusal, found.scope, found.in_place, found.state_at_start) == (None, scope, in_place, at_start)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Noisy", "draws random numbers"),
        ("Remembering", "keeps state outside of its parameters' state"),
        ("Listing", "its state 'last' is a list"),
    ],
)
def test_what_could_not_go_on_from_a_checkpoint_is_refused(name: str, said: str) -> None:
    assert said in str(probe(OWN + name, 1e-2, 0.0, {}).refusal)


@pytest.mark.parametrize(
    ("target", "options", "option", "said"),
    [
        ("AdamW", {"betas": [0.9, 2], "eps": 1e-8}, "betas", "Invalid beta parameter at index 1: 2"),
        ("AdamW", {"amsgrad": True, "capturable": True}, "capturable", "If capturable=True"),
        ("SGD", {"nesterov": True}, "nesterov", "Nesterov momentum requires a momentum"),
        ("Rprop", {"etas": [2, 0.5]}, "etas", "Invalid eta values"),
    ],
)
def test_the_option_at_fault_is_named(target: str, options: dict[str, object], option: str, said: str) -> None:
    found = probe(f"torch.optim.{target}", 1e-2, 0.0, options)
    assert (found.option, said in str(found.refusal)) == (option, True), found
