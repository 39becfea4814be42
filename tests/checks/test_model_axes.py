"""What ``check`` says about the model axes, without torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mgpu_pipe.checks.model_axes import across_nodes, model_axis_errors
from mgpu_pipe.checks.notices import unused_options
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.topology import BatchPlan, ParallelDims


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


def test_flash_attention_is_refused_where_the_balance_loss_could_not_tell_rows_apart() -> None:
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
def test_groups_that_reach_across_nodes_are_told(dims: ParallelDims, devices: int, keys: list[str]) -> None:
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
def test_keys_that_nothing_reads_are_told(overrides: list[str], key: str) -> None:
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


def test_options_of_an_axis_that_is_not_there_are_told() -> None:
    config = composed("strategy.pipeline.schedule=zbv", "strategy.context.method=ulysses")
    assert [key for key, _ in unused_options(config)] == ["strategy.pipeline.schedule", "strategy.context.method"]
    used = composed("strategy=cp", "strategy.pp=2", "strategy.pipeline.schedule=zbv", "strategy.fsdp.prefetch=2")
    assert unused_options(used) == []
