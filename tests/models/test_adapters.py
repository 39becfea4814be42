"""LoRA layers. Oracle: the peft package on transformers' own model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.lora import add_adapters, is_adapter, lora_layers, merge_adapters, without_adapters
from mgpu_pipe.models.adapters.low_rank import row_norms
from mgpu_pipe.models.adapters.peft_folder import magnitude_layer, name_in_peft
from mgpu_pipe.models.build import build_meta, materialise
from tests.models.tiny import tiny_model
from tests.support.encoders import ENCODER_MODELS, ENCODERS, SEEING
from tests.support.exact import BOUND, distance
from tests.support.sampling import one_in
from tests.support.tiny import MODELS, SEQ_LEN, VOCABULARY

KEYS = PeftConfig(name="lora", r=4, alpha=12.0, rslora=True)


def meta(name: str) -> Any:
    if name in ENCODERS:
        return build_meta(ENCODER_MODELS[name], ENCODERS[name].model_class).eval()  # training hides frames
    return build_meta(MODELS[name])


def adapted(name: str, keys: PeftConfig = KEYS) -> Any:
    model = meta(name)
    add_adapters(model, keys)
    model = materialise(model, 3, "cpu").double()
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("lora_B", "lora_magnitude")):  # as after some training: zero hides A
            parameter.data.normal_(generator=generator, std=0.05)
    return model


def batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (3, SEQ_LEN), generator=torch.Generator().manual_seed(2))


def loss_of(model: Any) -> torch.Tensor:
    if model.config.model_type in SEEING:
        seen = ENCODERS[model.config.model_type]
        return seen.loss(partial(_shown, model), seen.batch(0, 4))
    generator = torch.Generator().manual_seed(2)
    heard = {"wav2vec2": ("input_values", (3, 400)), "whisper": ("input_features", (3, 8, 32))}
    if model.config.model_type in heard:
        name, shape = heard[model.config.model_type]
        inputs = {name: torch.randn(shape, generator=generator, dtype=torch.float64)}
        inputs["labels"] = torch.randint(1, 12, (3, 5), generator=generator)
    else:
        inputs = {"input_ids": batch(), "labels": batch(), "use_cache": False}
    loss: torch.Tensor = model(**inputs).loss
    return loss


def _shown(model: Any, **inputs: Any) -> Any:
    pixels = {"pixel_values": inputs["pixel_values"].double()} if "pixel_values" in inputs else {}
    return model(**{**inputs, **pixels})


@pytest.mark.parametrize(
    ("name", "kind"), one_in(3, product(("llama", "gpt2", "wav2vec2", "whisper", *SEEING), ("lora", "dora")))
)
def test_loss_gradients_and_merged_weights_are_those_of_peft(name: str, kind: Any) -> None:
    """Of models that see, the language part alone; their tower is frozen."""
    from peft import LoraConfig, get_peft_model

    ours = adapted(name, replace(KEYS, name=kind, targets=["language"] if name in SEEING else KEYS.targets))
    assert name not in SEEING or not any(p.requires_grad for n, p in ours.named_parameters() if "vis" in n)
    stock: Any = materialise(meta(name), 3, "cpu").double()
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        use_rslora=True,
        use_dora=kind == "dora",
        target_modules=[layer for layer, _ in lora_layers(ours)],
        fan_in_fan_out=name == "gpt2",
    )
    theirs = get_peft_model(stock, config).double()
    pairs = {}
    named = dict(theirs.named_parameters())
    for own_name, parameter in ours.named_parameters():
        if is_adapter(own_name):
            theirs_name = f"{name_in_peft(own_name).removesuffix('.weight')}.default.weight"
            pairs[own_name] = named[theirs_name]
            layer = magnitude_layer(own_name)
            norms = 0 if layer is None else row_norms(ours.get_submodule(layer).rows())
            pairs[own_name].data.copy_(parameter.data + norms)
    assert (
        len(pairs)
        == len(lora_layers(ours)[0][1].PARAMETERS) * len(lora_layers(ours))
        == sum(p.requires_grad for p in ours.parameters())
    )
    loss, truth = loss_of(ours), loss_of(theirs)
    loss.backward()
    truth.backward()
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
    for own_name, parameter in ours.named_parameters():
        if own_name in pairs:
            assert distance(parameter.grad, pairs[own_name].grad) <= BOUND
    merge_adapters(ours)
    assert not lora_layers(ours)
    assert [type(one).__name__ for one in ours.modules()] == [type(one).__name__ for one in meta(name).modules()]
    merged = theirs.merge_and_unload().state_dict()
    for own_name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.data, merged[own_name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_first_step_starts_from_the_models_own_result(kind: Any) -> None:
    model = build_meta(MODELS["llama"])
    add_adapters(model, replace(KEYS, name=kind))
    start = materialise(model, 3, "cpu").double()
    stock = materialise(build_meta(MODELS["llama"]), 3, "cpu").double()
    torch.testing.assert_close(loss_of(start), loss_of(stock), rtol=0, atol=0)
    layer = start.model.layers[0].mlp.down_proj
    limit = layer.in_features**-0.5
    assert 0.8 * limit < float(layer.lora_A.detach().abs().max()) <= limit


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_switched_off_they_do_nothing(kind: Any) -> None:
    model = adapted("llama", replace(KEYS, name=kind))
    stock = materialise(build_meta(MODELS["llama"]), 3, "cpu").double()
    changed = loss_of(model)
    with without_adapters(model):
        torch.testing.assert_close(loss_of(model), loss_of(stock), rtol=1e-14, atol=0)
    assert torch.equal(loss_of(model), changed) and abs(float(changed / loss_of(stock)) - 1) > 1e-4


def test_routers_experts_and_the_head_are_left_alone() -> None:
    model = build_meta(MODELS["mixtral"])
    add_adapters(model, KEYS)
    names = {name.rpartition(".")[2] for name, _ in lora_layers(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


EXPERTS = PeftConfig(name="lora", r=4, alpha=12.0, targets=["experts"])


def test_adapters_of_experts_are_those_of_peft() -> None:
    from peft import LoraConfig, get_peft_model

    ours = adapted("mixtral", EXPERTS)
    stock: Any = materialise(build_meta(MODELS["mixtral"]), 3, "cpu").double()
    stock.set_experts_implementation("eager")
    both = ["experts.gate_up_proj", "experts.down_proj"]
    theirs = get_peft_model(stock, LoraConfig(r=4, lora_alpha=12, target_modules=[], target_parameters=both)).double()
    named = dict(theirs.named_parameters())
    pairs = {}
    for name, parameter in ours.named_parameters():
        if is_adapter(name):
            layer, _, own = name.rpartition(".")
            weight, one = own.rsplit("_lora_", 1)
            depth = next(d for d in range(3) if _wraps(theirs.get_submodule(_inside(layer, d)), weight))
            pairs[name] = named[f"{_inside(layer, depth)}.lora_{one}.default.weight"]
            pairs[name].data.copy_(_as_peft(parameter.data, one))
    assert len(pairs) == 8
    loss, truth = loss_of(ours), loss_of(theirs)
    loss.backward()
    truth.backward()
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
    for name, parameter in ours.named_parameters():
        if name in pairs:
            assert parameter.grad is not None
            gradient = _as_peft(parameter.grad, name[-1])
            assert distance(gradient, pairs[name].grad) <= BOUND
    merge_adapters(ours)
    ours.set_experts_implementation("eager")
    torch.testing.assert_close(loss_of(ours), truth, rtol=1e-12, atol=0)
    assert type(ours.model.layers[0].mlp.experts) is type(build_meta(MODELS["mixtral"]).model.layers[0].mlp.experts)


def _inside(layer: str, depth: int) -> str:
    return f"base_model.model.{layer}{'.base_layer' * depth}"


def _wraps(module: Any, weight: str) -> bool:
    return bool(getattr(module, "parameter_name", None) == weight)


def _as_peft(value: torch.Tensor, one: str) -> torch.Tensor:
    """(experts, rank, inputs) and (experts, outputs, rank) as peft's matrices."""
    return value.flatten(0, 1) if one == "A" else value.permute(1, 2, 0).flatten(1)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_of_other_forms_are_as_when_merged(family: str) -> None:
    """gpt_oss stores its weights transposed, with biases and a gate of its own. Oracle: transformers' own experts."""
    model: Any = build_meta(tiny_model(family))
    add_adapters(model, replace(EXPERTS, targets=["all-linear", "experts"]))
    model = materialise(model, 3, "cpu").double()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    ids = batch()
    adapted_logits = model(input_ids=ids, use_cache=False).logits
    merge_adapters(model)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, adapted_logits, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rank", [3, 4])
def test_experts_in_fp32_and_without_tokens_are_as_in_float64(rank: int) -> None:
    """Ranks that torch's grouped product takes, and one that it does not."""
    model = adapted("mixtral", replace(EXPERTS, r=rank))
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(10, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    chosen, weights = torch.tensor([[0, 2]] * 10), torch.full((10, 2), 0.5, dtype=torch.float64)
    found = []
    for dtype in (torch.float64, torch.float32):
        experts.to(dtype)
        parameters = [p for p in experts.parameters() if p.requires_grad]
        result = experts(hidden.to(dtype), chosen, weights.to(dtype))
        found.append([result, *torch.autograd.grad(result.square().sum(), parameters)])
    for exact, rounded in zip(*found, strict=True):
        torch.testing.assert_close(rounded.double(), exact, rtol=1e-4, atol=1e-6)
    assert all(float(g[1].abs().sum()) == 0 for g in found[1][1:]), "expert 1 had no tokens"


def test_what_is_trained_besides() -> None:
    model = build_meta(MODELS["llama"])
    add_adapters(model, PeftConfig(name="lora", r=2, targets=["q_proj", "model.layers.0.mlp.*"], train_also=["*norm*"]))
    layers = [name for name, _ in lora_layers(model)]
    assert [name for name in layers if name.endswith("q_proj")] == [
        f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)
    ]
    assert len(layers) == 5
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not is_adapter(name)} == {n for n, _ in model.named_parameters() if "norm" in n}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"targets": ["q_porj"]}, "peft.targets=q_porj: matches nothing in the model; did you mean q_proj?"),
        ({"targets": []}, r"peft.targets=\[\]: no linear layer is targeted; use \[all-linear\]"),
        ({"r": 4096}, "peft.r=4096: model.layers.0.self_attn.q_proj has .* inputs and .* outputs; use at most"),
        ({"targets": ["experts"]}, "peft.targets=experts: the model has no packed weights of experts; leave it out"),
        ({"train_also": ["nrom"]}, "peft.train_also=nrom: matches nothing"),
    ],
)
def test_what_cannot_be_adapted_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        add_adapters(build_meta(MODELS["llama"]), PeftConfig(name="lora", **keys))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["all-linear"], ["*.q_proj", "language"]])
def test_a_frozen_tower_gets_no_adapters(targets: list[str]) -> None:
    model = build_meta(replace(ENCODER_MODELS["llava"], freeze=["vision"]), ENCODERS["llava"].model_class)
    add_adapters(model, PeftConfig(name="lora", r=2, targets=targets))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and not [name for name in trained if "vision_tower" in name]


@pytest.mark.parametrize("keys", [{"targets": ["vision"]}, {"train_also": ["vision"]}, {"targets": ["out_proj"]}])
def test_adapters_for_a_frozen_tower_alone_are_refused(keys: dict[str, Any]) -> None:
    model = build_meta(replace(ENCODER_MODELS["llava"], freeze=["vision"]), ENCODERS["llava"].model_class)
    with pytest.raises(ConfigError, match=r"is frozen or never used; leave it out, or take them out of model.freeze"):
        add_adapters(model, PeftConfig(name="lora", r=2, **keys))
