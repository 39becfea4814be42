"""Adapters by their targets, experts over nodes, shared experts and latent attention.

Oracles: the adapters of real modules, closed forms on hardware where nothing is lost, and layers of other shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mgpu_pipe.architectures.formulas.flops import Shape
from mgpu_pipe.architectures.formulas.parameters import layer_counts
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, PeftConfig
from mgpu_pipe.models.adapters.lora import add_adapters, is_adapter
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import model_fields, resolved_fields
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.planning.model_work import run_work
from mgpu_pipe.planning.other_models import adapted_share, adapter_parameters
from mgpu_pipe.planning.run_hardware import predicted_seconds
from mgpu_pipe.planning.step_time import step_time
from tests.models.tiny import tiny_model
from tests.planner.test_step_time import H100, IDEAL, MODEL

TARGETS = (["all-linear"], ["q_proj", "v_proj"], ["*_proj"], ["model.layers.0.*"], ["up_proj", "*.layers.1.mlp.*"])


@pytest.mark.parametrize("peft", ["lora", "dora"])
@pytest.mark.parametrize("targets", TARGETS, ids=" ".join)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_adapters_are_counted_by_their_targets(family: str, targets: list[str], peft: str) -> None:
    if family == "qwen3_moe" and "up_proj" in targets:
        return  # experts are packed
    keys, config = PeftConfig(name=peft, r=2, targets=targets), tiny_model(family)  # type: ignore[arg-type]
    model, fields = build_meta(config), resolved_fields(config)
    add_adapters(model, keys)
    added = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    routers = 2 * (64 + 4 + (peft == "dora") * 2) if targets == ["model.layers.0.*"] and family == "qwen3_moe" else 0
    assert fields["num_hidden_layers"] * adapter_parameters(keys, fields) == pytest.approx(added, abs=routers)
    assert (adapted_share(targets, fields) == 1) == (targets in (["all-linear"], ["*_proj"]))


def test_adapters_of_packed_experts_are_counted() -> None:
    keys, config = PeftConfig(name="lora", r=2, targets=["all-linear", "experts"]), tiny_model("qwen3_moe")
    model, fields = build_meta(config), resolved_fields(config)
    add_adapters(model, keys)
    added = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    assert fields["num_hidden_layers"] * adapter_parameters(keys, fields) == added


def test_fewer_targets_need_less_time_and_memory() -> None:
    words = ["model=llama3_8b", "peft=lora", "peft.r=64", "trainer.devices=1", "trainer.accelerator=cuda"]
    whole, few = (
        compose([*words, "plan.hardware=[h100]", *more])[0] for more in ([], ["peft.targets=[q_proj,k_proj,v_proj]"])
    )
    assert predicted_seconds(few)[0] < 0.92 * predicted_seconds(whole)[0]
    plans = [memory_by_rank(config) for config in (few, whole)]
    assert plans[0] is not None and plans[1] is not None
    state = 32 * 64 * (3 * 4096 + 4096 + 2 * 1024) * 12  # weight and two moments
    assert plans[0].terms["optimizer"] + plans[0].terms["weights"] < plans[1].terms["weights"] + state


def test_tokens_for_experts_of_other_nodes_share_the_network() -> None:
    sparse = replace(MODEL, inner=1024, experts=64, chosen=8, dp_shard=32)
    sent = 4 * 32 * 2 * 2 * 2 * 8192 * 4096 * 8  # micro-batches, layers, passes, there and back, bytes
    near = step_time(replace(sparse, ep=8), H100, IDEAL).expert_parallel
    assert near == pytest.approx(sent * 7 / 8 / 450e9, rel=1e-6)
    far = step_time(replace(sparse, ep=32), H100, IDEAL).expert_parallel
    assert far == pytest.approx(sent * 24 / 32 / (400e9 / 8), rel=1e-6)  # three of four nodes are others
    heads = replace(MODEL, cp=16, ulysses=1.0, micro_batches=1)
    alone = step_time(replace(heads, cp=8), H100, IDEAL).context_parallel
    ratio = (8 / 16 / 2 / (400e9 / 8)) / (7 / 8 / 450e9)  # half of the tokens, of which half cross
    assert step_time(heads, H100, IDEAL).context_parallel == pytest.approx(ratio * alone, rel=1e-6)


def test_shared_experts_compute_every_token() -> None:
    sparse = replace(MODEL, inner=1024, experts=64, chosen=8)
    shared, more = (replace(sparse, shared=2), replace(sparse, chosen=10))
    assert float(step_time(shared, H100, IDEAL).compute) == pytest.approx(
        float(step_time(more, H100, IDEAL).compute), rel=1e-6
    )
    assert shared.model_flops == more.model_flops
    spread = (float(step_time(replace(work, dp_shard=8, ep=8), H100, IDEAL).expert_parallel) for work in (shared, more))
    assert next(spread) < next(spread)  # tokens stay with shared experts


def test_latent_attention_has_its_own_matrices_and_heads() -> None:
    """DeepSeek-V3: 37B active parameters of 671B, queries of 192 and values of 128 (arXiv:2412.19437, 4.2)."""
    config = compose(["model=hf", "model.type=deepseek_v3", "data.seq_len=4096"])[0]
    fields = model_fields(config.model)
    work = run_work(config, fields)
    assert (work.head_dim, work.shared, Shape.from_fields(fields).head_dim) == (160, 1, 160)
    active = work.attention_parameters + (work.chosen + work.shared) * work.expert_parameters
    counted = layer_counts(fields)[60]
    assert active == pytest.approx(counted.active, rel=0.01)
    assert work.layer_parameters == pytest.approx(counted.total, rel=0.01)
    plain = replace(work, attention_weights=0.0)
    assert work.attention_parameters == pytest.approx(187e6, rel=0.01)
    assert float(step_time(work, H100, IDEAL).compute) < float(step_time(plain, H100, IDEAL).compute)


def test_other_families_keep_their_heads() -> None:
    fields = resolved_fields(ModelConfig(name="llama3_8b", type="llama", config={"hidden_size": 4096}))
    assert Shape.from_fields(fields).head_dim == 128


def test_a_live_reference_adds_a_forward_pass() -> None:
    words = ["model=llama3_8b", "data=spoken_preferences", "objective=dpo", "trainer.devices=8", "strategy=fsdp"]
    words += ["trainer.accelerator=cuda", "plan.hardware=[h100]", "data.seq_len=2048", "data.global_batch_size=64"]
    cached, live = (compose([*words, f"objective.reference={kind}"])[0] for kind in ("cached", "live"))
    passes = [run_work(config, model_fields(config.model)).other_passes for config in (cached, live)]
    assert passes == [0, 1]
    assert predicted_seconds(live)[0] == pytest.approx(4 / 3 * predicted_seconds(cached)[0], rel=0.06)
    products = float(step_time(MODEL, H100, IDEAL).compute)
    assert float(step_time(replace(MODEL, other_passes=1), H100, IDEAL).compute) == pytest.approx(4 / 3 * products)
