"""The search of layouts and the verb ``plan``. Oracles: the checks of a run, the composed overrides, and every layout
of a small world by the rules of :mod:`mgpu_pipe.topology`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, LayerCosts, stage_layers
from mgpu_pipe.checks.layout_candidates import find_candidates, with_layout
from mgpu_pipe.checks.plan_layouts import _fits_host, plan_layouts
from mgpu_pipe.checks.preflight import preflight_errors
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import model_fields
from mgpu_pipe.planning.hardware_profile import HardwareProfile, load_profile
from mgpu_pipe.planning.layout_search import (
    AllowedSizes,
    Layout,
    Sharding,
    _layers_of_stages,
    enumerate_layouts,
    layout_at,
)
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.planning.model_work import run_work
from mgpu_pipe.planning.step_time import step_time
from mgpu_pipe.planning.work import Work
from mgpu_pipe.topology import BatchPlan, ParallelDims
from tests.support.sampling import one_in

LARGE = ["model=llama3_70b", "data.seq_len=4096", "data.global_batch_size=512", "plan.hardware=[h100]"]
CLUSTER = [*LARGE, "trainer.num_nodes=8", "trainer.devices=8"]
SMALL = ["model=llama_tiny", "data.seq_len=64", "data.global_batch_size=16"]
TOY = Work(
    layers=4, width=64, inner=128, heads=4, key_value_heads=2, head_dim=16, vocabulary=256, sequence=64, context=64
)  # fmt: skip


def composed(*words: str) -> RunConfig:
    return compose(list(words))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    one_in(
        2,
        [
            CLUSTER,
            [*CLUSTER[:-1], "trainer.devices=4", "precision=bf16_true"],
            ["model=qwen3_30b_a3b", "data.global_batch_size=64", "plan.hardware=[h200]", "trainer.devices=8"],
            ["model=llama3_8b", "plan.hardware=[rtx4090]", "trainer.devices=8", "data.global_batch_size=64"],
            ["model=llama3_8b", "plan.hardware=[h200]", "data.global_batch_size=8", "trainer.devices=2"],
            [*SMALL, "trainer.devices=4"],
        ],
    ),
    ids=lambda words: words[0] + " " + words[-1],
)
def test_every_plan_passes_the_checks_and_is_what_its_overrides_compose(words: list[str]) -> None:
    plans, _ = plan_layouts(composed(*words, "plan.rows=4"))
    kept = [word for word in words if not word.startswith(("trainer.devices", "trainer.num_nodes"))]
    assert len(plans) == 4
    for plan in plans:
        config = composed(*kept, *plan.overrides)
        assert not preflight_errors(config, elsewhere=True)
        dims = ParallelDims.from_config(config.trainer, config.strategy)
        assert dims == ParallelDims.resolve(plan.config.strategy, plan.gpus)
        assert BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp).micro_batch_size == (
            plan.layout.micro_batch_size
        )
        assert memory_by_rank(config) == plan.memory
        assert plan.memory.likely <= plan.profile.memory_bytes
        assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)


def test_every_layout_of_a_small_world_is_tried_once() -> None:
    sizes = (1, 2, 4, 8)
    found = enumerate_layouts(TOY, 8, 16, AllowedSizes(sizes, sizes[:3], sizes, (1,), checkpointing=("none",)))
    seen = [layout_at(found, index) for index in range(np.size(found.tp))]
    assert len(set(seen)) == len(seen)
    expected = set()
    for tp, pp, cp, shard, replicas in ((a, b, c, d, e) for a in sizes for b in sizes[:3] for c in sizes
                                        for d in sizes for e in sizes):  # fmt: skip
        if tp * pp * cp * shard * replicas == 8:
            share = 16 // (shard * replicas)
            micros = [micro for micro in range(1, share + 1) if share % micro == 0 and share // micro >= pp]
            expected |= {(tp, pp, cp, shard, replicas, micro) for micro in micros}
    assert {(s.tp, s.pp, s.cp, s.dp_shard, s.dp_replicate, s.micro_batch_size) for s in seen} == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_searched_unless_the_configuration_names_it(schedule: str) -> None:
    words = [*SMALL, "trainer.devices=4", "data.global_batch_size=32", "model.config.num_hidden_layers=8"]
    config = composed(*words, f"strategy.pipeline.schedule={schedule}", "plan.rows=99")
    layouts = find_candidates(config, load_profile("cpu"), 4).kinds[0].layouts
    tried = {layout_at(layouts, index).schedule for index in np.flatnonzero(np.asarray(layouts.pp) > 1).tolist()}
    assert tried == ({schedule} if schedule != "1f1b" else {*SCHEDULES} - {"gpipe"})
    plans = [plan for plan in plan_layouts(config)[0] if plan.layout.pp > 1]
    assert len({plan.layout.pp for plan in plans}) == 2
    for plan in plans:
        found = composed(*words, *plan.overrides)
        assert found.strategy.pipeline == plan.config.strategy.pipeline and not preflight_errors(found, elsewhere=True)


def test_a_typed_schedule_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    """1F1B among them, which is the default."""
    words = [*SMALL, "trainer.devices=4", "data.global_batch_size=32", "model.config.num_hidden_layers=8"]
    for word in ("strategy.pipeline.schedule=1f1b", "plan.schedules=[1f1b]"):
        assert main(["plan", *words, word, "plan.rows=99", "--json"]) == 0
        plans = json.loads(capsys.readouterr().out)["plans"]
        chosen = [word for plan in plans for word in plan["overrides"]]
        assert any(word.startswith("strategy.pp=") for word in chosen)
        assert not any(word.startswith("strategy.pipeline.schedule=") for word in chosen)
    capsys.readouterr()
    typed = "strategy.pipeline.schedule=1f1b"
    for refused, reason in (
        (["plan.schedules=[1f2b]"], "plan.schedules[0]=1f2b: did you mean 1f1b?"),
        ([typed, "plan.schedules=[zbv]"], f"{typed}: plan.schedules does not try it; leave out"),
    ):
        assert main(["plan", *words, *refused]) == 2
        assert reason in capsys.readouterr().err


def test_a_schedule_that_splits_the_backward_pass_is_tried_where_torch_allows_it() -> None:
    words = (*LARGE, "trainer.devices=8", "strategy.pipeline.schedule=zbv")
    for more, tries in (((), True), (("model.compile=true",), False), (("precision=fp8",), False)):
        layouts = find_candidates(composed(*words, *more), load_profile("h100"), 8).kinds[0].layouts
        assert bool(np.any(np.asarray(layouts.pp) > 1)) is tries
        assert not np.any((np.asarray(layouts.pp) > 1) & (np.asarray(layouts.recompute_elementwise) > 0))


def test_heads_are_exchanged_for_tokens_where_that_is_faster() -> None:
    allowed = AllowedSizes(cp=(1, 2), ulysses=frozenset({(1, 1), (1, 2)}), checkpointing=("none",))
    tried = enumerate_layouts(TOY, 2, 4, allowed)
    layouts = [layout_at(tried, index) for index in range(np.size(tried.tp))]
    assert sum(layout.context == "ulysses" for layout in layouts) == sum(layout.cp == 2 for layout in layouts) // 2 > 0
    words = ("model=llama3_8b", "data.seq_len=8192", "data.global_batch_size=1", "plan.hardware=[h100]")
    config = composed(*words, "trainer.devices=8", "plan.rows=40", "precision=bf16")
    slow = replace(load_profile("h100"), link_gb_s=1.0)  # a ring of 8 sends 7 times the keys and values
    times = {
        method: _step_of(config, slow, Layout(1, 1, 8, 1, 1, 1, 1, 1, "none", False, method))
        for method in ("ring", "ulysses")
    }
    assert times["ulysses"] < times["ring"]
    chosen = with_layout(config, Layout(1, 1, 8, 1, 1, 1, 1, 1, "none", False, "ulysses"))
    assert chosen.strategy.context.method == "ulysses"


def _step_of(config: RunConfig, profile: HardwareProfile, layout: Layout) -> float:
    changed = with_layout(config, layout)
    work = run_work(changed, model_fields(changed.model))
    return float(np.asarray(step_time(work, profile.hardware, profile.all_constants).context_parallel))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bulk_estimate_of_memory_is_that_of_every_rank(schedule: str) -> None:
    config = composed(*CLUSTER, f"strategy.pipeline.schedule={schedule}")
    found = find_candidates(config, load_profile("h100"), 64)
    order = np.argsort(found.sizes)
    near = order[np.sort(found.sizes) < 4 * load_profile("h100").memory_bytes]
    stages = np.concatenate([np.broadcast_to(kind.layouts.pp, np.shape(kind.sizes)) for kind in found.kinds])
    deep = near[stages[near] >= 16]
    for index in (*near[:: len(near) // 8].tolist(), *deep[:: max(1, len(deep) // 6)].tolist()):
        memory = memory_by_rank(with_layout(found.config, found.layout(index)))
        assert memory is not None and found.sizes[index] == pytest.approx(memory.likely, rel=0.035)


def test_equal_layers_are_cut_as_the_stages_of_a_run() -> None:
    for layers, stages, head in ((80, 32, 2.3), (80, 16, 1.2), (32, 4, 0.0), (30, 8, 4.7), (9, 9, 3.0), (126, 16, 0.4)):
        costs = LayerCosts(embedding=1e-9, layers=(1.0,) * layers, head=head)
        assert _layers_of_stages(layers, stages, head) == [len(part) for part in stage_layers(costs, stages)]


def test_offload_is_chosen_where_nothing_else_fits_and_the_host_has_the_memory() -> None:
    words = ("model=llama3_70b", "data.seq_len=4096", "data.global_batch_size=8", "trainer.devices=8")
    plans, losers = plan_layouts(composed(*words, "plan.hardware=[h100]"))
    assert {plan.layout.sharding.offload for plan in plans} == {"cpu"} and losers.too_large_for_host > 0  # replicas
    assert {plan.config.strategy.name for plan in plans} >= {"fsdp", "zero3"}
    assert plans[0].memory.host == pytest.approx(16 * 70.55e9 / 8, rel=0.001)  # fp32 weights, gradients, two moments
    poor = replace(load_profile("h100"), host_memory_gib=1000.0)
    found = find_candidates(composed(*words), poor, 8)
    fits = _fits_host(found, poor)
    assert fits[found.host == 0].all() and not fits[found.host > 0].any() and (found.host > 0).any()


def test_offload_and_zero_lose_where_the_state_fits_on_the_gpus() -> None:
    words = ("model=llama32_1b", "data.seq_len=4096", "data.global_batch_size=16", "trainer.devices=4")
    plans, _ = plan_layouts(composed(*words, "plan.hardware=[h200]", "plan.rows=99"))
    assert plans[0].layout.sharding == Sharding()
    best = {(plan.config.strategy.engine, plan.layout.sharding.offload): plan.seconds for plan in plans[::-1]}
    assert best["mesh", "cpu"] > best["mesh", "none"] and best["deepspeed", "cpu"] > best["deepspeed", "none"]
    assert {plan.layout.sharding.zero for plan in plans} == {0, 1, 2, 3}


@pytest.mark.parametrize("gpus", [1, 8])
def test_shardings_are_estimated_in_bulk_as_each_alone(gpus: int) -> None:
    profile = load_profile("h100")
    config = composed("model=llama3_8b", "data.global_batch_size=64", f"trainer.devices={gpus}")
    found = find_candidates(config, profile, gpus)
    seconds = np.asarray(found.times(profile.hardware, profile).total)
    for kind in found.kinds[1:]:
        at = int(np.flatnonzero(found.sizes == kind.sizes[0])[0])
        changed = with_layout(found.config, found.layout(at))
        memory = memory_by_rank(changed)
        assert memory is not None and found.sizes[at] == pytest.approx(memory.likely, rel=0.001)
        assert found.host[at] == pytest.approx(memory.host, abs=1)
        alone = step_time(run_work(changed, model_fields(changed.model)), profile.hardware, profile.all_constants)
        assert seconds[at] == pytest.approx(float(np.asarray(alone.total)), rel=1e-9)


def test_more_gpus_and_other_hardware_are_compared() -> None:
    config = composed(
        "model=llama3_8b", "data.global_batch_size=64", "plan.hardware=[h100,a100_80]", "plan.gpus=[8,16]"
    )
    plans, _ = plan_layouts(config)
    assert {(plan.profile.name, plan.gpus) for plan in plans} == {
        ("h100", 8),
        ("h100", 16),
        ("a100_80", 8),
        ("a100_80", 16),
    }
    assert len(plans) == 8 and (plans[0].profile.name, plans[0].gpus) == ("h100", 16)
    priced = replace(config, plan=replace(config.plan, price=2.0, rank_by="cost"))
    cheapest = plan_layouts(priced)[0]
    costs = [plan.dollars_per_token for plan in cheapest]
    assert costs == sorted(costs) and cheapest[0].gpus == 8
    assert costs[0] == pytest.approx(2 * 8 / 3600 / cheapest[0].tokens_per_second)
    smallest = plan_layouts(replace(config, plan=replace(config.plan, rank_by="memory")))[0]
    assert smallest[0].memory.likely < plans[0].memory.likely


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        plan_layouts(composed(*words))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_world_that_no_layout_fits_names_the_bytes_and_the_nearest_that_does() -> None:
    large = [*LARGE[:-1], "plan.hardware=[rtx4090]"]
    said = refusal(*large, "trainer.devices=8")
    assert said.startswith("plan.gpus=8: no layout fits on 8 of rtx4090: the smallest needs ")
    assert "GiB too many; use plan.gpus=" in said
    enough = int(said.partition("use plan.gpus=")[2].partition(",")[0])
    assert plan_layouts(composed(*large, f"plan.gpus=[{enough}]"))[0]
    refusal(*large, f"plan.gpus=[{enough // 2}]")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan.hardware=[h1000]"], "plan.hardware=h1000: no such hardware; did you mean h100?"),
        (["plan.network=ethernet"], "plan.network=ethernet: no such network"),
        (["plan.rank_by=cost"], "cpu has no price; give plan.price"),
        (["trainer.accelerator=cuda"], "the kind of GPU is not known; name it: plan.hardware=h100"),
        (["plan.gpus=[12]", "plan.hardware=[h100]"], "plan.gpus=12: a node of h100 has 8 GPUs; use 8 or 16"),
        (["plan.gpus=[0]"], "plan.gpus=0: use numbers of at least 1"),
        (["trainer.devices=7"], "data.global_batch_size=16: no layout divides it over 7 processes; use plan.gpus=4"),
        (["model=vit_tiny"], "plan a language model"),
    ],
)
def test_bad_input_is_refused_with_its_fix(words: list[str], said: str) -> None:
    assert said in refusal(*SMALL, *words)


def test_keys_of_plans_are_no_part_of_a_runs_identity() -> None:
    config = composed(*SMALL)
    other = composed(*SMALL, "plan.hardware=[h100]", "plan.gpus=[8]", "plan.price=2", "plan.tokens=1e9", "plan.rows=3")
    assert config.plan != other.plan
    assert mathematics_hash(config) == mathematics_hash(other)


@pytest.mark.slow
def test_the_command_prints_plans_and_imports_no_torch(tmp_path: Path) -> None:
    words = [
        "plan",
        *CLUSTER[:3],
        "plan.hardware=h100",
        *CLUSTER[4:],
        "plan.tokens=1e12",
        "plan.price=2.5",
        "strategy=ddp",
        "strategy.tp=4",
        "strategy.fsdp.prefetch=2",
    ]
    program = (
        f"import sys; from mgpu_pipe.cli.main import main; code = main({words!r}); print('torch' in sys.modules, code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=120,
        env={**os.environ, "COLUMNS": "250"},
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "False 0", done.stderr
    assert lines[0].split()[:4] == ["layout", "rows", "checkpointing", "step"]
    assert sum(line.startswith("1: strategy=") for line in lines) == 1
    (check,) = [line for line in lines if line.startswith("check it: mgpu-pipe check ")]
    assert check.count("plan.") == check.count("plan.hardware=h100") == check.count("trainer.devices=") == 1
    assert "strategy=ddp" not in check and "strategy.tp=4" not in check and "strategy.fsdp.prefetch=2" in check
    assert any(line.startswith("1T tokens by 1: ") and "dollars" in line and "kWh" in line for line in lines)


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "trainer.devices=2", "--json", "plan.rows=2"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["plans"]) == 2 and content["layouts"] > 10
    best = content["plans"][0]
    assert best["hardware"] == "cpu" and best["gpus"] == 2 and best["dollars_per_token"] is None
    assert math.isclose(sum(best["seconds_by_part"].values()), best["seconds_per_step"])
    assert sum(best["memory_bytes"]["terms"].values()) == best["memory_bytes"]["likely"]
    assert best["overrides"][-3:] == ["trainer.devices=2", "trainer.num_nodes=1", "trainer.accelerator=cpu"]


def test_overrides_replace_what_an_experiment_sets_of_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=llama3_70b_megatron", "plan.hardware=[h100]", "plan.rows=3"]
    assert main(["plan", *words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    expected = plan_layouts(composed(*words))[0]
    assert len(plans) == len(expected) == 3
    for plan, same in zip(plans, expected, strict=True):
        config = composed(*words, *plan["overrides"])
        assert config.strategy.pipeline == same.config.strategy.pipeline
        dims = ParallelDims.from_config(config.trainer, config.strategy)
        assert dims == ParallelDims.resolve(same.config.strategy, same.gpus)
        memory = memory_by_rank(config)
        assert memory is not None and memory.likely == plan["memory_bytes"]["likely"]


def test_nodes_are_those_of_the_run() -> None:
    words = ["model=llama3_8b", "plan.hardware=[h100]", "data.global_batch_size=64", "plan.rows=1", "trainer.devices=1"]
    slow = "plan.network=ethernet_1x25"
    (spread,), _ = plan_layouts(composed(*words, slow, "trainer.num_nodes=8"))
    (near,), _ = plan_layouts(composed(*words[:-1], slow, "trainer.devices=8"))
    assert spread.seconds > 2 * near.seconds
    (wider,), _ = plan_layouts(composed(*words, slow, "plan.gpus=[8]"))
    assert wider.seconds == spread.seconds and wider.config.trainer.num_nodes == 8


def test_precision_chooses_the_peak() -> None:
    words = ["model=llama3_8b", "plan.hardware=[h100]", "data.global_batch_size=64", "plan.rows=1", "trainer.devices=8"]
    kinds = (["precision=bf16"], ["precision=fp32", "precision.tf32=true"], ["precision=fp32"])
    seconds = [plan_layouts(composed(*words, *kind))[0][0].seconds for kind in kinds]
    assert seconds == sorted(seconds) and seconds[2] > 3 * seconds[1]
    said = refusal(*words, "plan.hardware=[a100_80]", "precision=fp8")
    assert said == "precision.name=fp8: a100_80 has no float8 units; use precision=bf16"


def test_hardware_without_a_plan_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_70b", "plan.hardware=h100,rtx4090", "plan.gpus=1", "data.global_batch_size=8"]
    assert main(["plan", *words]) == 0
    assert "no plan: plan.gpus=1: no layout fits on 1 of rtx4090: " in capsys.readouterr().out


def test_a_step_too_small_for_the_gpus_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "plan.hardware=h100", "plan.gpus=8", "plan.rows=1", "data.seq_len=128"]
    for samples, is_small in ((32, True), (64, False)):
        assert main(["plan", *words, f"data.global_batch_size={samples}"]) == 0
        said = f"note: a step of {128 * samples:,} tokens is too small for 8 GPUs" in capsys.readouterr().out
        assert said == is_small


def test_adapters_and_four_bits_need_less() -> None:
    words = [
        "model=llama3_8b",
        "plan.hardware=[h100]",
        "data.global_batch_size=8",
        "plan.rows=9",
        "plan.rank_by=memory",
    ]
    kinds = ("none", "lora", "qlora")
    plans = [plan_layouts(composed(*words, "trainer.devices=1", f"peft={peft}"))[0] for peft in kinds]
    without, lora, qlora = ([plan for plan in each if plan.layout.sharding == Sharding()] for each in plans)
    assert not without and qlora[0].memory.likely < lora[0].memory.likely
    offloaded = {(plan.config.strategy.name, plan.layout.sharding.offload): plan for plan in plans[0]}
    assert {*offloaded} == {("single", "cpu"), ("zero2", "cpu"), ("zero3", "cpu")}
    for plan in plans[0]:
        config = composed(*words, *plan.overrides)
        assert memory_by_rank(config) == plan.memory and not preflight_errors(config, elsewhere=True)


def test_a_family_without_known_shapes_says_what_is_assumed() -> None:
    config = composed("plan.hardware=[h100]", "trainer.devices=8", "plan.rows=1", "data.global_batch_size=16")
    (plan,), _ = plan_layouts(replace(config, model=ModelConfig(type="olmo")))
    assert plan.memory.assumes == "olmo: the usual layer with its fields"


def test_keys_of_deepspeed_stand_in_the_command_of_its_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["model=llama3_70b", "data.global_batch_size=8", "trainer.devices=8", "plan.hardware=h100", "plan.rows=2"]
    kept = [f"strategy.offload_path={tmp_path}", "strategy.deepspeed_config.zero_optimization.sub_group_size=1000"]
    assert main(["plan", *words, *kept, "strategy.offload=none", "strategy.deepspeed.stage=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (check,) = [line for line in lines if line.startswith("check it: ")]
    assert all(word in check for word in kept) and "strategy.offload=none" not in check
    assert "strategy.deepspeed.stage" not in check and "strategy.offload=cpu" in check
    assert any("ZeRO-3 x offload cpu" in line for line in lines)
