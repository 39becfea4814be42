"""What ``check`` says about a pipeline: refusals with their fix, the picture, the bubble. Without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.architectures.formulas.pipeline_schedules import (
    SCHEDULES,
    LayerCosts,
    micro_batches_fit,
    stage_contents,
    stage_layers,
)
from mgpu_pipe.checks.notices import notices
from mgpu_pipe.checks.pipeline import pipeline_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.parallel.pipeline.work_order import pipeline_picture, schedule_lines

EIGHT = {"num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama", 4, "1fb1", 8), "strategy.pipeline.schedule=1fb1: no such schedule; did you mean 1f1b?"),
        (
            ("mamba", 2, "1f1b", 8),
            "strategy.pp=2: mamba cannot be cut into stages; use 1; the axes for it are dp_replicate, dp_shard",
        ),
        (
            ("llama", 9, "1f1b", 9),
            "strategy.pp=9: 1f1b cuts 8 layers into 9 stages; use at most strategy.pp=8, or a "
            "model of at least 9 layers",
        ),
        (
            ("llama", 6, "zbv", 12),
            "strategy.pp=6: zbv cuts 8 layers into 12 stages; use at most strategy.pp=4, or "
            "strategy.pipeline.schedule=1f1b, or a model of at least 12 layers",
        ),
        (
            ("llama", 4, "1f1b", 3),
            "strategy.pipeline.schedule=1f1b: on 4 ranks it does not take 3 micro-batches a "
            "step; make it 4 by data.global_batch_size or data.micro_batch_size",
        ),
        (
            ("llama", 4, "dualpipev", 6),
            "strategy.pipeline.schedule=dualpipev: on 4 ranks it does not take 6 "
            "micro-batches a step; make it 8 by data.global_batch_size or "
            "data.micro_batch_size",
        ),
        (
            ("llama", 2, "interleaved_1f1b", 5),
            "strategy.pipeline.schedule=interleaved_1f1b: on 2 ranks it does not "
            "take 5 micro-batches a step; make it 4 or 6 by "
            "data.global_batch_size or data.micro_batch_size",
        ),
        (
            ("llama", 2, "zbv", 4, True),
            "model.compile=true: zbv computes gradients of inputs and weights apart, which "
            "torch refuses to do with compiled modules; use false, or "
            "strategy.pipeline.schedule=gpipe or 1f1b or interleaved_1f1b",
        ),
        (
            ("llama", 2, "1f1b", 4, False, [5, 2]),
            "strategy.pipeline.layers=5,2: the sum is 7, the model has 8 layers; make the sum 8, e.g. 4,4",
        ),
        (
            ("llama", 2, "zbv", 4, False, [4, 4]),
            "strategy.pipeline.layers=4,4: zbv with pp=2 has 4 stages; give 4 numbers",
        ),
        (("llama", 2, "1f1b", 4, False, [8, 0]), "strategy.pipeline.layers=8,0: give every stage at least 1 layer"),
        (("llama", 2, "zbv", 4, False, None, 3), "strategy.pipeline.stages_per_rank=3: zbv has 2 on a rank; use 2"),
    ],
)
def test_what_cannot_work_is_said_with_the_fix(arguments: tuple[object, ...], said: str) -> None:
    assert [str(error) for error in pipeline_errors(EIGHT, *arguments)] == [said]  # type: ignore[arg-type]


def test_blocks_kept_in_part_are_refused_where_backward_passes_are_split() -> None:
    (error,) = pipeline_errors(EIGHT, "llama", 2, "zbv", 4, checkpointing="selective")
    assert str(error).startswith("strategy.activation_checkpointing=selective: zbv goes back through a block twice")
    assert str(error).endswith("use full or none, or strategy.pipeline.schedule=gpipe or 1f1b or interleaved_1f1b")
    assert pipeline_errors(EIGHT, "llama", 2, "zbv", 4, checkpointing="full") == []
    assert pipeline_errors(EIGHT, "llama", 2, "1f1b", 4, checkpointing="selective") == []


def test_a_family_whose_layers_are_not_known_is_refused_without_them() -> None:
    (error,) = pipeline_errors({}, "mamba", 2, "1f1b", 4)
    assert "cannot be cut into stages" in str(error)


def test_what_works_has_no_errors_and_several_come_together() -> None:
    for name in SCHEDULES:
        compiled = not SCHEDULES[name].splits_backward
        assert pipeline_errors(EIGHT, "gpt2", 4, name, 8, compiled) == []
    assert pipeline_errors({}, "mamba", 1, "zbv", 1, True) == []
    assert len(pipeline_errors(EIGHT, "mamba", 6, "dualpipev", 1, True)) == 4


def test_the_picture_of_1f1b() -> None:
    assert pipeline_picture("1f1b", 3, 4) == [
        "rank 0  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3",
        "rank 1  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .",
        "rank 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .",
        "F forward, B backward, . idle",
    ]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_pictures_fit_the_page_and_show_every_rank(name: str) -> None:
    for ranks, count in ((2, 4), (4, 8), (4, 16), (8, 64), (12, 24)):
        assert micro_batches_fit(name, ranks, count)
        lines = pipeline_picture(name, ranks, count)
        assert max(map(len, lines)) <= 100
        assert [line.split()[:2] for line in lines[:ranks]] == [["rank", str(rank)] for rank in range(ranks)]


def test_the_lines_of_check_name_bubble_and_stages() -> None:
    costs = LayerCosts(0.0, (1.0,) * 4, 1.0, 2_000_000, (1_000_000,) * 4, 2_000_000, 0, tied=True)
    contents = stage_contents(costs, stage_layers(costs, 4), (0, 1, 1, 0))
    lines = schedule_lines("zbv", 2, 4, contents)
    bubble = "bubble 4.0% of the step, if all stages were equally fast; at most 4 passes of a stage in flight on a rank"
    assert lines[0] == "zbv, 2 ranks of 2 stages, 4 micro-batches, gradients of inputs and weights apart"
    assert bubble in lines
    assert lines[-4] == "stage 0 on rank 0: embedding, layer 0, 3M parameters, 20% of the work"
    # The head is the embedding's own weight, which this rank has already.
    assert lines[-1] == "stage 3 on rank 0: layer 3, norm and head, 1M parameters, 40% of the work"


def test_no_torch_is_needed() -> None:
    code = "import sys, mgpu_pipe.report.overview, mgpu_pipe.checks.pipeline; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize(("schedule", "slow"), [("zbv", True), ("1f1b", False)])
def test_recomputation_under_a_split_backward_pass_is_said_to_be_slow(schedule: str, slow: bool) -> None:
    words = ["model=llama_tiny", "strategy=pp", "trainer.devices=2", "trainer.accelerator=cpu"]
    words += [f"strategy.pipeline.schedule={schedule}", "strategy.activation_checkpointing=full", "model.compile=false"]
    keys = [notice.key for notice in notices(compose(words)[0]) if notice.text.startswith("slow")]
    assert keys == ["strategy.activation_checkpointing"] * slow
