"""A rank's memory by the formulas, beside what was measured and published."""

from __future__ import annotations

import json
import statistics
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy.plan_memory import LAYOUTS, compared
from benchmarks.gpu.cuda_step import CASES
from benchmarks.gpu.gpu_step import BASE, OURS
from benchmarks.gpu.one_rank import one_rank, overrides_of
from benchmarks.new_process import call_in_new_process
from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, micro_batches_fit, stages_by_rank
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.parallel.pipeline.work_order import Stream, streams
from mgpu_pipe.planning.layout_costs import passes_in_flight
from mgpu_pipe.planning.memory import MemoryPlan, memory_by_rank
from mgpu_pipe.planning.other_models import FOUR_BITS
from tests.planner.published_memory import GIB, predicted, rows
from tests.support.sampling import one_in

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FP8 = "mgpu_pipe, packed, fp8, micro-batches of 4"
CONTRADICTED = "L670"
"""Its columns are those of L608, which prints half the memory."""


def planned(*overrides: str) -> MemoryPlan:
    plan = memory_by_rank(compose([*overrides])[0])
    assert plan is not None
    return plan


def measured(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["rows"]
    return found


@pytest.mark.parametrize(
    "row", [row for row in measured("gpu_step-gpu.json") if row["case"].startswith("mgpu")], ids=lambda row: row["case"]
)
def test_peaks_on_a_gpu_within_five_percent(row: dict[str, Any]) -> None:
    case = row["case"]
    words = (*OURS["mgpu_pipe, packed, fp8"], "data.micro_batch_size=4") if case == FP8 else OURS[case]
    plan = planned(*BASE, *words, "trainer.accelerator=cuda")
    assert plan.tensor_bytes / GIB == pytest.approx(row["peak GiB"], rel=0.05)
    assert plan.low < row["peak GiB"] * GIB < plan.high


def errors_of(table: str) -> dict[str, float]:
    """Errors of the predicted memory in percent, by row."""
    return {
        row["row"]: 100 * (sum(predicted(row).values()) / (float(row["mem_gib"]) * GIB) - 1)
        for row in rows(table)
        if row["row"] != CONTRADICTED
    }


def test_published_memory_of_sharded_runs() -> None:
    errors = {name: abs(error) for name, error in errors_of("torchtitan").items() if not name.startswith("405B")}
    assert len(errors) == 12
    assert statistics.mean(errors.values()) < 2.5 and max(errors.values()) < 6, errors


@pytest.mark.parametrize(("table", "mean", "worst"), [("torchtitan", 5, 16), ("bloom_bench", 5, 15)])
def test_published_memory_of_pipelines(table: str, mean: float, worst: float) -> None:
    errors = [abs(error) for error in errors_of(table).values()]
    assert statistics.mean(errors) < mean and max(errors) < worst, errors


WHOLE = [
    row
    for row in measured("one_rank-cpu.json")
    if row["case"] in ("single", "experts1", "ddp8", "zero1, 8", "zero3, 8")
]


@pytest.mark.parametrize("row", WHOLE, ids=lambda row: row["case"])
def test_live_bytes_of_cpu_processes_within_three_percent(row: dict[str, Any]) -> None:
    case = CASES[row["case"]]
    words = (*overrides_of(case, False), f"trainer.devices={case.ranks}", "trainer.accelerator=cpu")
    assert planned(*words).tensor_bytes / (1 << 20) == pytest.approx(row["memory_mib"], rel=0.03)


KEPT = [row for row in measured("one_rank-cpu.json") if CASES[row["case"]].rank == 0 and "zero" not in row["case"]]


@pytest.mark.parametrize("row", one_in(3, KEPT), ids=lambda row: row["case"])
def test_weights_and_optimizer_of_every_axis_are_those_that_were_measured(row: dict[str, Any]) -> None:
    case = CASES[row["case"]]
    words = (*overrides_of(case, False), f"trainer.devices={case.ranks}", "trainer.accelerator=cpu")
    terms = planned(*words).terms
    for name in ("weights", "optimizer"):
        # A rank of many may hold a row more than its share.
        assert terms[name] / (1 << 20) == pytest.approx(row[f"{name}_mib"], rel=0.06 if case.ranks > 1 else 1e-4), name


SMALL = ("model=llama_small", "data.seq_len=256", "data.micro_batch_size=2", "trainer.accelerator=cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    one_in(
        4,
        [
            "precision=bf16 strategy.activation_checkpointing=full",
            "precision=fp32",
            "precision=fp32 peft=lora",
            "precision=fp32 strategy.activation_checkpointing=selective",
        ],
    ),
)
def test_a_live_run_holds_what_the_formulas_say(overrides: str) -> None:
    words = (*SMALL, "data.global_batch_size=4", "strategy=single", *overrides.split())
    found = call_in_new_process(one_rank, 0, 1, words)
    plan = planned(*words)
    assert plan.terms["weights"] == found["weights"]
    assert plan.tensor_bytes == pytest.approx(found["memory"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("layout", one_in(6, list(LAYOUTS)))
def test_kept_bytes_and_peak_of_a_traced_step_are_those_of_the_formulas(layout: str) -> None:
    from multiprocessing import get_context

    with get_context("fork").Pool(1) as pool:
        kept, planned_kept, peak, planned_peak = pool.apply(compared, (layout,))
    error = 0.05 if "pp" in layout else 0.03
    assert planned_kept == pytest.approx(kept, rel=0.01) and planned_peak == pytest.approx(peak, rel=error)


def most_kept(stream: Stream) -> int:
    """The most forward passes of a rank whose gradients of weights are not there yet."""
    steps = [{"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] for action in stream]
    return max(accumulate(steps))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_in_flight_are_those_of_the_streams(schedule: str) -> None:
    for ranks in (2, 4, 8):
        stages = len(stages_by_rank(schedule, ranks)[0])
        for micro_batches in (ranks, 2 * ranks, 4 * ranks):
            if micro_batches_fit(schedule, ranks, micro_batches):
                exact = np.array([most_kept(stream) for stream in streams(schedule, ranks, micro_batches)])
                found = passes_in_flight(schedule, np.arange(float(ranks)), ranks, stages, micro_batches) * stages
                # ZB-V of as few micro-batches as ranks holds less than it can.
                full = schedule != "zbv" or micro_batches > ranks
                assert np.all(found == exact) if full else np.all(found >= exact)


@pytest.mark.parametrize(
    ("schedule", "rank", "gib"), [("interleaved_zero_bubble", 3, 19.04), ("zbv", 0, 16.60), ("dualpipev", 0, 16.76)]
)
def test_split_backward_passes_keep_the_gradients_that_a_trace_does(schedule: str, rank: int, gib: float) -> None:
    """Peaks of ``python -m mgpu_pipe.training.tracing.trace_rank RANK 4`` with these words."""
    words = "model=llama32_1b data.seq_len=4096 data.global_batch_size=32 data.micro_batch_size=1 precision=bf16"
    split = f"strategy=megatron strategy.pp=4 trainer.devices=4 strategy.pipeline.schedule={schedule}"
    plan = planned(*words.split(), *split.split(), "trainer.accelerator=cuda")
    assert plan.rank == rank and plan.tensor_bytes / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.slow
def test_terms_follow_the_settings() -> None:
    eight = (
        *("model=llama3_8b", "trainer.accelerator=cuda", "precision=bf16", "trainer.devices=8", "strategy=fsdp"),
        "data.seq_len=4096",
    )
    whole = planned(*eight)
    assert whole.low < whole.likely < whole.high
    assert planned(*eight, "strategy.activation_checkpointing=full").likely < 0.7 * whole.likely
    assert "optimizer" not in planned(*eight, "strategy.offload=cpu").terms
    lora = planned(*eight, "peft=lora").terms
    assert lora["optimizer"] < whole.terms["optimizer"] / 100 and lora["weights"] == pytest.approx(
        whole.terms["weights"], rel=0.01
    )
    assert planned(*eight, "peft=qlora").terms["weights"] < whole.terms["weights"] / 3
    alone = (*eight[:3], "trainer.devices=1", "strategy=single", "data.seq_len=512")
    gathered = planned(*alone, "peft=qlora").terms["gathered weights"]  # the blocks' bytes once more, tables in bf16
    blocks = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096)
    assert gathered == pytest.approx(FOUR_BITS * blocks + 2 * (2 * 128_256 * 4096 + 4096), rel=0.001)
    assert planned(*eight, "optimizer=adamw_bf16").terms["optimizer"] == whole.terms["optimizer"] // 2
    chunked, logits = (planned(*eight, f"objective.loss_chunk_tokens={rows}").likely for rows in (512, 0))
    assert chunked < logits
    eager = planned(*eight, "model.attn_implementation=eager").terms["activations"]
    assert eager > whole.terms["activations"]


def test_what_has_no_known_shapes_is_not_guessed() -> None:
    assert memory_by_rank(compose(["model=vit_tiny", "data=digits", "objective=image_classification"])[0]) is None
