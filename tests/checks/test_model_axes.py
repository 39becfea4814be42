"""What ``check`` says about the model axes (tp, sequence parallelism, cp, ep), without torch.

Oracle of the experts: transformers' own configuration classes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from mgpu_pipe.architectures.find import families_with, family_of, has_tensor_plan, library_plan
from mgpu_pipe.checks.model_axes import (
    across_nodes,
    context_parallel_errors,
    expert_count,
    expert_parallel_errors,
    model_axis_errors,
    router_loss_errors,
    tensor_parallel_errors,
)
from mgpu_pipe.checks.notices import unused_options
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.topology import BatchPlan, ParallelDims


def fields_of(family: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return resolved_fields(ModelConfig(name=family, type=family, config=dict(given or {})))


LLAMA = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}


def tensor_messages(
    family: str, fields: dict[str, Any], tp: int, sequence_parallel: bool = False, seq_len: int = 24
) -> list[str]:
    errors = tensor_parallel_errors(fields_of(family, fields), family, tp, sequence_parallel, seq_len)
    return [str(error) for error in errors]


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_sizes_that_fit(tp: int) -> None:
    assert tensor_messages("llama", LLAMA, tp, True) == []


@pytest.mark.parametrize(
    ("family", "fields", "tp", "what"),
    [
        ("llama", LLAMA, 8, "it does not divide the 12 attention heads; use one of [1, 2, 4, 12]"),
        ("llama", LLAMA, 3, "neither divides the 4 key-value heads nor is divided by them; use one of [1, 2, 4, 12]"),
        ("llama", {**LLAMA, "intermediate_size": 98}, 4, "intermediate_size=98; use one of [1, 2]"),
        ("gpt2", {"n_embd": 40, "n_head": 4}, 8, "it does not divide the 4 attention heads; use one of [1, 2, 4]"),
        ("gpt2", {"n_embd": 40, "n_head": 4, "n_inner": 90}, 4, "n_inner=90; use one of [1, 2]"),
        ("qwen3_moe", {"moe_intermediate_size": 772}, 8, "moe_intermediate_size=772; use one of [1, 2, 4]"),
        ("mamba", {}, 2, "the mamba family has no plan for tensor parallelism; use strategy.tp=1; the axes for it are"),
    ],
)
def test_sizes_that_do_not_fit(family: str, fields: dict[str, Any], tp: int, what: str) -> None:
    found = tensor_messages(family, fields, tp)
    assert any(what in message for message in found), found
    assert all(message.startswith(f"strategy.tp={tp}: ") for message in found)


def test_sequence_parallelism() -> None:
    (length,) = tensor_messages("llama", LLAMA, 4, True, 30)
    assert length.startswith("data.seq_len=30: ") and "use 28 or 32" in length
    (family,) = tensor_messages("gemma2", {}, 4, True, 32)
    assert family.startswith("strategy.sequence_parallel=true: the gemma2 family has no plan for it")


def context_messages(model_type: str, cp: int, method: str, seq_len: int, tp: int = 1, **config: Any) -> list[str]:
    errors = context_parallel_errors(fields_of(model_type, config), model_type, cp, method, seq_len, tp)
    return [str(error) for error in errors]


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    assert context_messages("llama", 4, "ring", 256) == context_messages("llama", 1, "ring", 7) == []
    (ring,) = context_messages("llama", 4, "ring", 260)
    assert ring == "data.seq_len=260: not a multiple of 2 * strategy.cp = 8; use 256 or 264"
    assert context_messages("llama", 4, "ulysses", 260) == []
    (short,) = context_messages("llama", 4, "ulysses", 3)
    assert short.endswith("use 4")
    (heads,) = context_messages("gpt2", 5, "ulysses", 100, n_head=12, attn_pdrop=0.0)
    assert heads.startswith("strategy.cp=5: ") and "12 heads" in heads
    assert heads.endswith("use one of [1, 2, 3, 4, 6, 12], or strategy.context.method=ring")
    (shared,) = context_messages("llama", 4, "ulysses", 256, tp=2, num_attention_heads=12, num_key_value_heads=2)
    assert "12 heads / strategy.tp=2" in shared and "[1, 2, 3, 6]" in shared
    assert context_messages("llama", 4, "ulysses", 256, tp=2, num_attention_heads=8, num_key_value_heads=2) == []


@pytest.mark.parametrize("model_type", ["gpt_neo", "opt", "mamba"])
def test_families_that_cannot_are_refused_with_those_that_can(model_type: str) -> None:
    (message,) = context_messages(model_type, 2, "ring", 256)
    assert message.startswith("strategy.cp=2: ") and model_type in message and "llama, " in message


@pytest.mark.parametrize(
    ("model_type", "config", "key"),
    [
        ("mistral", {"sliding_window": 100}, "model.config.sliding_window=100"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "model.config.attn_logit_softcapping=50.0"),
        ("gpt2", {"attn_pdrop": 0.1}, "model.config.attn_pdrop=0.1"),
        ("llama", {"attention_dropout": 0.2}, "model.config.attention_dropout=0.2"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "model.config.use_bidirectional_attention=true"),
    ],
)
def test_attention_that_is_not_computed_is_refused_by_its_field(
    model_type: str, config: dict[str, Any], key: str
) -> None:
    changes: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": None}, "gpt2": {"attn_pdrop": 0.0}}
    quiet = changes.get(model_type, {})
    assert context_messages(model_type, 2, "ring", 256, **quiet) == []
    (message,) = context_messages(model_type, 2, "ring", 256, **{**quiet, **config})
    assert message.startswith(key + ": ")


def test_a_window_that_is_not_used_or_long_enough_is_fine() -> None:
    assert context_messages("qwen3", 2, "ring", 8192) == []
    assert context_messages("mistral", 2, "ring", 4096) == []
    assert context_messages("mistral", 2, "ring", 8192, sliding_window=None) == []
    assert len(context_messages("mistral", 2, "ring", 8192)) == 1


def test_rotary_tables_by_the_length_of_the_run_are_the_same_on_every_rank() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0}
    assert context_messages("llama", 2, "ring", 256, rope_parameters=rope) == []


@pytest.mark.parametrize("family", families_with(lambda family: family.experts))
def test_each_family_brings_a_plan_and_says_how_many_experts_it_has(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert "ep_dispatch_experts" in (config.base_model_ep_plan or {}).values()
    fields = fields_of(family)
    assert expert_count(fields, family) == getattr(config, family_of(family).experts)


def test_balanced_families_are_among_them() -> None:
    assert all(family_of(name).experts for name in families_with(lambda family: family.softmax_routers))


def expert_error(model_type: str, ep: int, fields: dict[str, int], sizes: list[int] | None = None) -> str:
    (error,) = expert_parallel_errors(fields, model_type, ep, sizes)
    assert error.key == "strategy.ep" and error.value == ep
    return str(error)


def test_sizes_that_divide_and_no_expert_parallelism_are_taken() -> None:
    assert expert_parallel_errors({"num_local_experts": 8}, "mixtral", 4) == []
    assert expert_parallel_errors({}, "llama", 1) == []


def test_a_dense_family_is_refused_with_those_that_have_experts() -> None:
    text = expert_error("llama", 2, {})
    assert text.startswith("strategy.ep=2: the llama family has no experts")
    assert "mixtral" in text and "qwen3_moe" in text


def test_experts_that_do_not_divide_are_refused_with_sizes_that_work() -> None:
    text = "strategy.ep=3: does not divide model.config.num_local_experts=8; use 1 or 2 or 4 or 8"
    assert expert_error("mixtral", 3, {"num_local_experts": 8}) == text
    assert expert_error("mixtral", 3, {"num_local_experts": 8}, [1, 2, 4]).endswith("use 1 or 2 or 4")
    assert expert_error("mixtral", 3, {"num_local_experts": 8}, [3, 6]).endswith(
        "use 1, or a multiple of 3 as model.config.num_local_experts"
    )


def test_a_balance_loss_wants_routers_that_take_a_softmax() -> None:
    assert router_loss_errors("llama", 0.0) == router_loss_errors("mixtral", 0.01) == []
    (dense,), (sigmoid,) = router_loss_errors("llama", 0.01), router_loss_errors("deepseek_v3", 0.01)
    assert str(dense).startswith("objective.router_aux_loss=0.01: the llama family has no routers; those with: ernie")
    assert "do not choose by softmax" in str(sigmoid)
    assert router_loss_errors("mixtral", -1.0)[0].key == "objective.router_aux_loss"


def composed(*overrides: str) -> RunConfig:
    return compose(["model=llama_tiny", *overrides])[0]


def said(config: RunConfig, dims: ParallelDims) -> list[str]:
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    return [str(error) for error in model_axis_errors(config, dims, plan, resolved_fields(config.model))]


def test_flash_attention_is_refused_in_a_pipeline() -> None:
    config = composed()
    config = replace(config, model=replace(config.model, attn_implementation="flash_attention_2"))
    (error,) = said(config, ParallelDims(pp=2))
    assert error.startswith("model.attn_implementation=flash_attention_2: it lays a micro-batch's rows end to end")


def test_flash_attention_is_refused_where_the_balance_loss_cannot_separate_rows() -> None:
    config = composed("model=mixtral_tiny", "strategy.sequence_parallel=true", "objective.router_aux_loss=0.01")
    config = replace(config, model=replace(config.model, attn_implementation="flash_attention_2"))
    (error,) = said(config, ParallelDims(dp_shard=2, tp=2, ep=4))
    assert error.startswith("model.attn_implementation=flash_attention_2: it lays rows end to end")
    assert said(config, ParallelDims(dp_shard=2, tp=2)) == []


@pytest.mark.parametrize(
    ("dims", "devices", "keys"),
    [
        (ParallelDims(tp=4, dp_shard=4), 8, []),
        (ParallelDims(tp=8, dp_shard=2), 4, ["strategy.tp"]),
        (ParallelDims(tp=3, dp_shard=8), 8, ["strategy.tp"]),
        (ParallelDims(ep=8, dp_shard=16), 8, []),
        (ParallelDims(ep=8, dp_shard=8, cp=2), 8, ["strategy.ep"]),
        (ParallelDims(pp=4, cp=4), 8, []),
    ],
)
def test_groups_that_reach_across_nodes_are_named(dims: ParallelDims, devices: int, keys: list[str]) -> None:
    assert [key for key, _ in across_nodes(dims, devices)] == keys


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["strategy=pp", "strategy.pipeline.schedule=zbv"], "strategy.pipeline.schedule"),
        (["strategy=fsdp", "trainer.devices=2", "strategy.bucket_mib=1"], "strategy.bucket_mib"),
        (["scheduler=linear", "scheduler.decay_steps=3"], "scheduler.decay_steps"),
        (["scheduler=constant", "scheduler.min_lr_ratio=0.5"], "scheduler.min_lr_ratio"),
        (["data=stdlib_text", "data.text_column=body"], "data.text_column"),
        (["data=stdlib_text", "data.synthetic.sigma=1"], "data.synthetic"),
        (["checkpoint.when_busy=skip"], "checkpoint.when_busy"),
        (["checkpoint.best_metric=train/loss"], "checkpoint.best_metric"),
        (["run.dir=here", "run.root=there"], "run.root"),
    ],
)
def test_keys_that_nothing_reads_are_named(overrides: list[str], key: str) -> None:
    assert [found for found, _ in unused_options(composed("trainer.accelerator=cpu", *overrides))] == [key]


def test_a_plain_run_has_no_key_that_nothing_reads() -> None:
    for overrides in (
        [],
        ["strategy=ddp", "trainer.devices=2", "precision=fp32", "strategy.bucket_mib=1"],
        ["strategy=cp", "model.attn_implementation=eager"],
        ["scheduler=constant"],
        ["scheduler=wsd"],
        ["data=synthetic", "data.synthetic.sigma=1"],
        ["checkpoint=none"],
    ):
        assert unused_options(composed("trainer.accelerator=cpu", *overrides)) == []


def test_options_of_an_axis_that_is_not_there_are_named() -> None:
    config = composed("strategy.pipeline.schedule=zbv", "strategy.context.method=ulysses")
    assert [key for key, _ in unused_options(config)] == ["strategy.pipeline.schedule", "strategy.context.method"]
    used = composed("strategy=cp", "strategy.pp=2", "strategy.pipeline.schedule=zbv", "strategy.fsdp.prefetch=2")
    assert unused_options(used) == []


WITHOUT_TORCH = """
import sys
from mgpu_pipe.checks.model_axes import context_parallel_errors, has_tensor_plan
assert len(context_parallel_errors({'num_attention_heads': 6}, 'llama', 4, 'ulysses', 9, 1)) == 2
assert has_tensor_plan('llama')
assert not {'torch', 'transformers'}.intersection(sys.modules)
"""


def test_sizes_are_checked_without_torch() -> None:
    assert library_plan("llama", "base_model_tp_plan")["layers.*.self_attn.o_proj"] == "rowwise"
    assert has_tensor_plan("gpt2") and not has_tensor_plan("gpt2_of_nobody")
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)
