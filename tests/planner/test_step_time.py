"""Seconds of a step against closed forms where nothing is left to fit, and against published runs."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace

import numpy as np
import pytest

from benchmarks.accuracy.plan_accuracy import cases, committed, predict_held_out, regret
from benchmarks.accuracy.published_runs import fit, fold_of, read_runs, rows_of_this_project
from benchmarks.gpu.gpu_step import BASE, OURS, WHOLE
from benchmarks.support import RESULTS
from mgpu_pipe.architectures.formulas.flops import Shape, training_flops_per_token
from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.models.fields import model_fields
from mgpu_pipe.parallel.pipeline.work_order import streams, timeline
from mgpu_pipe.planning.hardware_profile import load_profile
from mgpu_pipe.planning.layout_costs import bubble
from mgpu_pipe.planning.model_work import run_work
from mgpu_pipe.planning.run_hardware import predicted_seconds
from mgpu_pipe.planning.step_time import StepTime, step_time
from mgpu_pipe.planning.work import Constants, Hardware, Work, constant_names

MODEL = Work(
    layers=32, width=4096, inner=14336, heads=32, key_value_heads=8, head_dim=128, vocabulary=128256,
    sequence=8192, context=8192, gated=1, rows=1, micro_batches=4,
)  # fmt: skip
H100 = load_profile("h100").hardware
IDEAL = Constants(
    gemm=1, wave=1e-12, short=1e-12, attention=1, attention_backward=2, short_attention=1e-12, memory=1e12,
    launch=1e-12, link=1, link_latency=1e-12, network=1, network_latency=1e-12, overlap_loss=1e-12,
    micro_batch=1e-12, step=1e-12,
    stragglers=1e-12, bubble=1, reduction=1,
)  # fmt: skip
"""Nothing is lost: products run at the peak and memory is infinitely fast."""
OUR_ROWS = json.loads((RESULTS / "gpu_step-gpu.json").read_text())["rows"]
H200_ROWS = json.loads((RESULTS / "gpu_step-h200.json").read_text())["rows"]
COMMITTED = {row["runs"]: row for row in committed()}


def total(work: Work, constants: Constants = IDEAL, hardware: Hardware = H100) -> float:
    return float(step_time(work, hardware, constants).total)


def test_an_ideal_gpu_needs_the_models_flops_over_its_peak() -> None:
    shape = Shape(width=4096, layers=32, heads=32, key_value_heads=8, head_dim=128)
    parameters = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) + 4096 * 128256
    flops = 4 * 8192 * training_flops_per_token(parameters, shape, 8192)
    assert MODEL.model_flops == pytest.approx(flops)
    frozen = 4 * 8192 * training_flops_per_token(parameters, shape, 8192, frozen=parameters)
    assert replace(MODEL, trained=0).model_flops == pytest.approx(frozen)
    assert total(MODEL) == pytest.approx(flops / 989.4e12, rel=1e-6)


def test_recomputation_adds_a_forward_pass_of_the_layers() -> None:
    again = replace(MODEL, recompute_products=1, recompute_attention=1, recompute_elementwise=1)
    head = 4 * 8192 * 6 * 4096 * 128256 / 989.4e12
    assert total(again) - head == pytest.approx((total(MODEL) - head) * 4 / 3, rel=1e-6)


def test_an_ideal_pipeline_waits_for_its_stages_alone() -> None:
    model = replace(MODEL, vocabulary=256, is_balanced=0)
    whole = total(model)
    for pp, stages in ((4, 1), (4, 2), (8, 4)):
        found = step_time(replace(model, pp=pp, stages_per_rank=stages), replace(H100, link=1e18, network=1e18), IDEAL)
        assert found.bubble == pytest.approx(whole / 4 / pp * (pp - 1) / stages, rel=1e-3)
        assert found.compute == pytest.approx(whole / pp, rel=1e-2)


@pytest.mark.parametrize(
    ("schedule", "units"),
    [("gpipe", 3), ("1f1b", 3), ("interleaved_1f1b", 3), ("interleaved_zero_bubble", 1), ("zbv", 1), ("dualpipev", 1)],
)
def test_the_bubble_of_a_schedule_is_the_published_and_that_of_its_streams(schedule: str, units: int) -> None:
    """1F1B waits ``(p-1)(F+B)`` (arXiv:2104.04473), ZB-H1 ``(p-1)(F+B-W)``, in units of equal passes
    (arXiv:2401.10241, table 2); any other passes by the simulated streams."""
    assert bubble(schedule, 8, 64, 1.0, 1.0, 1.0) == units
    generator = random.Random(1)
    for ranks in (2, 3, 4, 8):
        for micro_batches in (2 * ranks, 4 * ranks):
            weights, forward, inputs = sorted(generator.uniform(0.3, 3) for _ in range(3))
            seconds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
            rows = timeline(streams(schedule, ranks, micro_batches), seconds)
            stages = SCHEDULES[schedule].stages_per_rank
            waits = max(row[-1].end for row in rows) - stages * micro_batches * (forward + inputs + weights)
            each = bubble(schedule, ranks, micro_batches, forward, inputs, weights)
            assert (ranks - 1) * each == pytest.approx(waits)


def test_zero_bubbles_are_filled_with_gradients_of_weights() -> None:
    model = replace(MODEL, vocabulary=256, is_balanced=0, layers=64, pp=4, stages_per_rank=2, micro_batches=8)
    fast = replace(H100, link=1e18, network=1e18)
    plain, *filled = (step_time(replace(model, schedule=float(index)), fast, IDEAL) for index in (2, 3, 4, 5))
    products = 2 * 8192 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) / 989.4e12
    attention = 2 * 8192 * 8192 * 4096 / 989.4e12  # half of the scores are masked
    layer = 3 * (products + attention)
    assert float(plain.bubble) == pytest.approx(3 / 2 * 16 * layer, rel=1e-3)
    zero_bubble, zbv, dualpipev = (float(found.bubble) / (3 / 2 * 16) for found in filled)
    assert zero_bubble == pytest.approx(products + 3 * attention, rel=1e-3)
    assert zbv == pytest.approx(max(products + 2 * attention, 4 * attention), rel=1e-3)
    late = products + 4 * attention - (products + attention) / 3
    assert dualpipev == pytest.approx(max(products + 3 * attention, late), rel=1e-3)
    adapted = replace(model, adapter_rank=16, trained=0.01)
    one, other = (float(step_time(replace(adapted, schedule=s), fast, IDEAL).bubble) for s in (2.0, 3.0))
    assert other == pytest.approx(one, rel=1e-3)  # weights without gradients fill nothing


def test_eager_blocks_move_as_many_bytes_as_measured() -> None:
    """Next to compiled ones: Hugging Face Trainer's step of a 1B model and a compiled loop's, on an H100."""
    rows = {row["case"]: row["seconds a step"] for row in OUR_ROWS}
    config = compose([*BASE, *WHOLE, "trainer.accelerator=cuda", "plan.hardware=[h100]"])[0]
    models = (replace(config.model, compile=compiles) for compiles in (True, False))
    compiled, eager = (predicted_seconds(replace(config, model=model))[0] for model in models)
    assert eager / compiled == pytest.approx(rows["Hugging Face Trainer"] / rows["compiled torch loop"], rel=0.03)


def test_a_balanced_pipeline_gives_the_stage_with_the_head_fewer_layers() -> None:
    cut = replace(MODEL, pp=4)
    assert total(cut) < total(replace(cut, is_balanced=0))


def test_tensor_parallelism_sends_two_all_reduces_a_layer_and_pass() -> None:
    found = step_time(replace(MODEL, tp=8), H100, IDEAL)
    sent = 4 * 32 * 2 * 2 * 2 * 7 / 8 * (2 * 8192 * 4096)
    assert found.tensor_parallel == pytest.approx(sent / 450e9, rel=1e-6)
    over_nodes = step_time(replace(MODEL, tp=16), H100, IDEAL)
    assert over_nodes.tensor_parallel == pytest.approx(sent * 15 / 14 / (400e9 / 1), rel=1e-6)


def test_what_gathers_take_longer_than_computing_is_exposed() -> None:
    sharded = replace(MODEL, dp_shard=64)
    assert float(step_time(sharded, H100, IDEAL).gathers) == pytest.approx(0, abs=1e-6)
    slow = replace(H100, network=1e9)
    found = step_time(sharded, slow, IDEAL)
    layer = 2 * 4096 * 128 * 40 + 3 * 4096 * 14336
    sent = 4 * 32 * layer * (2 + 2 + 4) * 63 / 64 / 1e9
    computed = float(found.compute) - 4 * 8192 * 6 * 4096 * 128256 / 989.4e12
    assert found.gathers == pytest.approx(sent - computed, rel=1e-6)


def test_offloaded_state_is_copied_and_updated_by_the_host() -> None:
    sharded = replace(MODEL, dp_shard=8, micro_batches=1, vocabulary=256, offloads=1, overlaps=0)
    slow = replace(H100, pcie=1e9, host_bandwidth=1e11)
    constants = replace(IDEAL, memory=1)
    found, near = (step_time(work, slow, constants) for work in (sharded, replace(sharded, offloads=0)))
    layer = 2 * 4096 * 128 * 40 + 3 * 4096 * 14336
    copied = 32 * layer / 8 * (4 + 4 + 4) / 0.8e9  # fp32 weights in both passes, gradients
    assert float(found.gathers - near.gathers) == pytest.approx(copied, rel=1e-6)
    parameters = 32 * layer + 2 * 256 * 4096
    assert float(found.optimizer) == pytest.approx(parameters * 30 / 1e11, rel=1e-6)  # all eight ranks by one host
    assert float(found.offload) == 0
    several = step_time(replace(sharded, micro_batches=4), slow, constants)
    waits = parameters / 8 * 4 * 4 / 0.8e9 + 3 * 12 * parameters / 1e11
    assert float(several.offload) == pytest.approx(waits, rel=1e-6)
    on_disk = step_time(replace(sharded, on_disk=1), replace(slow, disk=1e9), constants)
    assert float(on_disk.offload) == pytest.approx(32 * parameters / 0.8e9, rel=1e-6)


def test_frozen_weights_get_no_gradient_and_adapters_cost_narrow_products() -> None:
    adapted = replace(MODEL, trained=0.01, adapter_rank=16)
    products = 4 * 8192 * 6 * (32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) + 4096 * 128256) / 989.4e12
    inputs, outputs = 6 * 4096 + 14336, 3 * 4096 + 2 * 1024 + 2 * 14336
    narrow = 4 * 8192 * 32 * 6 * 64 * (inputs + outputs) / 989.4e12  # the rank padded to 64, six narrow products
    assert total(adapted) - total(MODEL) == pytest.approx(narrow - products / 3, rel=1e-6)
    constants = replace(IDEAL, memory=1)
    moved = (step_time(replace(MODEL, adapter_rank=rank), H100, constants).compute for rank in (16, 64))
    assert next(moved) == next(moved)


def test_four_bit_weights_are_dequantised_in_each_pass() -> None:
    constants = replace(IDEAL, memory=1)
    layer = 2 * 4096 * 128 * 40 + 3 * 4096 * 14336
    for again, passes in ((0.0, 2), (1.0, 3)):
        plain = replace(MODEL, adapter_rank=16, recompute_products=again)
        added = total(replace(plain, dequantised_bytes=22.5), constants) - total(plain, constants)
        assert added == pytest.approx(4 * passes * 32 * layer * 22.5 / 3350e9, rel=1e-6)
    cast = replace(MODEL, cast_bytes=10, dequantised_bytes=1e-12)
    tables = 2 * 4096 * 128256
    assert total(cast, constants) - total(replace(cast, cast_bytes=0), constants) == pytest.approx(40 * tables / 3350e9)
    words = ("model=llama3_8b", "peft=qlora", "trainer.devices=1", "trainer.accelerator=cuda", "plan.hardware=[h100]")
    for compiles, size in ((True, 0.5 + 2), (False, 0.5 + 2 + 2 + 4 + 8 + 6)):
        config = compose([*words, f"model.compile={str(compiles).lower()}"])[0]
        assert run_work(config, model_fields(config.model)).dequantised_bytes == size


def test_whole_weights_are_cast_for_each_micro_batch() -> None:
    cast, constants = replace(MODEL, cast_bytes=10), replace(IDEAL, memory=1)
    parameters = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) + 2 * 4096 * 128256
    added = total(cast, constants) - total(replace(cast, cast_bytes=0), constants)
    assert added == pytest.approx(4 * 10 * parameters / 3350e9, rel=1e-6)
    sharded = replace(cast, dp_shard=8)
    assert total(sharded, constants) == total(replace(sharded, cast_bytes=0), constants)


def test_lora_on_an_h200_is_predicted_within_a_twentieth() -> None:
    row = next(row for row in H200_ROWS if row["case"] == "mgpu_pipe, LoRA of 8B")
    config = compose([*BASE, *OURS[row["case"]], "trainer.accelerator=cuda", "plan.hardware=[h200]"])[0]
    assert predicted_seconds(config)[0] == pytest.approx(row["seconds a step"], rel=0.05)


def test_zero_two_reduces_each_micro_batch() -> None:
    plain = replace(MODEL, dp_shard=8, overlaps=0)
    once, each, mesh = (
        float(step_time(work, H100, IDEAL).reduction)
        for work in (replace(plain, zero=1), replace(plain, zero=2), replace(plain, zero=1, overlaps=1))
    )
    assert each - once == pytest.approx(3 * 4 / 6 * once, rel=1e-6) and mesh == pytest.approx(once, rel=1e-6)


def test_a_ring_passes_gradients_of_keys_and_values_in_fp32() -> None:
    work, slow = replace(MODEL, cp=4, pp=1), replace(H100, link=1e6, network=1e6)  # nothing hides in computation
    found = float(step_time(work, slow, IDEAL).context_parallel)
    hops, entries = 4 * 32 * 3, 2 * 8192 / 4 * 128 * 8
    attention = 4 * 32 * 3 * 2 * 8192 * 8192 / 4 * 4096 / 989.4e12
    assert found == pytest.approx(hops * entries * (2 + 2 + 4) / 1e6 - attention, rel=1e-4)
    late = step_time(work, replace(H100, link=1e18, network=1e18), replace(IDEAL, link_latency=1.0))
    assert float(late.context_parallel) == pytest.approx(hops * 3 - attention, rel=1e-6)


def test_ranks_of_a_node_share_its_network() -> None:
    replicas = replace(MODEL, zero=0, dp_replicate=16, micro_batches=1)
    alone = float(step_time(replicas, H100, IDEAL).reduction)
    shared = float(step_time(replace(replicas, tp=8), H100, IDEAL).reduction)
    assert alone == pytest.approx(shared, rel=1e-2)  # an eighth of the parameters by an eighth of the network


def test_experts_are_computed_by_their_tokens_and_held_by_their_ranks() -> None:
    dense = replace(MODEL, inner=1024)
    sparse = replace(dense, experts=64, chosen=8)
    wide = replace(dense, inner=8192)
    assert total(sparse) == pytest.approx(total(wide), rel=1e-6)
    assert float(step_time(replace(sparse, dp_shard=8, ep=8), H100, IDEAL).expert_parallel) > 0


def test_arrays_give_what_numbers_give() -> None:
    hardware, constants = load_profile("a100_80").hardware, load_profile("a100_80").all_constants
    layouts = [(1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 8, 1), (2, 4, 1)]
    tp, pp, dp_shard = (np.array(sizes, dtype=float) for sizes in zip(*layouts, strict=True))
    together = step_time(replace(MODEL, tp=tp, pp=pp, dp_shard=dp_shard), hardware, constants)
    for index, (t, p, d) in enumerate(layouts):
        alone = step_time(replace(MODEL, tp=float(t), pp=float(p), dp_shard=float(d)), hardware, constants)
        for field in fields(StepTime):
            parts = np.broadcast_to(getattr(together, field.name), (len(layouts),))
            assert parts[index] == pytest.approx(float(getattr(alone, field.name)), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("constant", constant_names())
def test_every_constant_has_a_part_in_some_prediction(constant: str) -> None:
    work = replace(MODEL, tp=2, pp=2, dp_shard=2, dp_replicate=4, inner=14330, recompute_products=1)
    cases = (
        (work,)
        + tuple(replace(work, **{name: value}) for name, value in (("flash", 0.0), ("head_dim", 75.0), ("float8", 1.0)))
        + (
            replace(work, dp_shard=64),
            replace(MODEL, width=64, inner=256, vocabulary=64, head_dim=2, sequence=16, context=16),
        )
    )
    priors = Constants()
    changed = replace(priors, **{constant: 2 * getattr(priors, constant)})
    assert any(total(case, changed) != total(case, priors) for case in cases)


def test_folds_are_fixed_by_the_rows_names() -> None:
    names = read_runs("vtrain_multi").names
    assert [fold_of(name) for name in names[:10]] == FIRST_FOLDS
    assert sorted({fold_of(name) for name in names}) == [0, 1, 2, 3, 4]


FIRST_FOLDS = [4, 2, 3, 4, 4, 3, 3, 2, 1, 3]


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_errors_are_within_the_demand(name: str) -> None:
    row = COMMITTED[name]
    if row["demand, %"] is not None:
        assert row["mean error, %"] <= row["demand, %"]
    if row["demand of regret, %"] is not None:
        assert row["regret, %"] <= row["demand of regret, %"]


def test_korthikantis_table_is_predicted_as_committed() -> None:
    name = "Korthikanti, table 5, a model held out"
    case = cases()[name]
    errors = 100 * np.abs(predict_held_out(case) / case.runs.seconds - 1)
    assert errors.mean() == pytest.approx(COMMITTED[name]["mean error, %"], abs=0.05)
    assert errors.max() <= 5


def test_runs_in_fp8_of_another_stack_are_predicted_as_committed() -> None:
    """Tensor, pipeline with virtual stages, context and data parallelism, fine-tuning and LoRA."""
    name = "NeMo and Megatron-Bridge in fp8, 5 folds"
    case = cases()[name]
    errors = 100 * np.abs(predict_held_out(case) / case.runs.seconds - 1)
    assert errors.mean() == pytest.approx(COMMITTED[name]["mean error, %"], abs=0.05)
    assert errors.max() <= 15


@pytest.mark.slow
def test_bloom_is_predicted_as_committed() -> None:
    case = cases()["BLOOM"]
    predicted = predict_held_out(case)
    errors = 100 * np.abs(predicted / case.runs.seconds - 1)
    assert errors.mean() == pytest.approx(COMMITTED["BLOOM"]["mean error, %"], abs=0.05)
    assert regret(case.runs, predicted) == pytest.approx(COMMITTED["BLOOM"]["regret, %"], abs=0.05)


@pytest.mark.parametrize(("profile", "gpu"), [("h100", None), ("a100_80", "A100-80"), ("a100_40", "A100-40")])
def test_the_profiles_constants_are_those_of_measured_runs(profile: str, gpu: str | None) -> None:
    runs = rows_of_this_project() if gpu is None else read_runs("llm_foundry", gpu=gpu)
    fitted, priors = runs.errors(load_profile(profile).all_constants).mean(), runs.errors(Constants()).mean()
    assert fitted < 4.5 and (gpu is None or fitted < priors)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    runs = read_runs("llm_foundry", gpu="A100-80")
    made = replace(Constants(), gemm=0.6, memory=0.5, link=0.4)
    again = replace(runs, seconds=runs.predict(made))
    found = fit(again, ("gemm", "memory", "link"), width=5.0)
    for name in ("gemm", "memory", "link"):
        assert getattr(found, name) == pytest.approx(getattr(made, name), rel=0.03)
