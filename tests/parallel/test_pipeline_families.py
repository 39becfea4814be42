"""Oracle: each family's plain model over the same step batch in one process; the bounds of verify.certificate."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.shrink_model import shrink_model
from tests.parallel.pipeline_support import build, expected, gradients_of, worst_error
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tiny import SEQ_LEN, step_batch

pytestmark = pytest.mark.slow

SCHEDULES = ["1f1b", "gpipe", "interleaved_1f1b", "zbv", "interleaved_zero_bubble", "dualpipev"]
KINDS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    **{"bloom": {}, "cohere": {}, "cohere2": {"layer_types": KINDS}, "deepseek_v3": {"first_k_dense_replace": 1}},
    **{"falcon": {"alibi": False}, "gemma": {}, "gemma2": {}, "gemma3_text": {"layer_types": KINDS}, "glm4": {}},
    **{"gpt_neox": {}, "gpt_oss": {}, "granite": {}, "granitemoe": {}, "olmo2": {}, "olmoe": {}, "opt": {}},
    **{"phi": {}, "phi3": {}, "smollm3": {}},
}
"""Families beside those of test_pipeline.py, and fields in which they differ from them."""


def small(family: str) -> ModelConfig:
    """Four layers of every kind that the family has."""
    given = ModelConfig(name=family, type=family, config=FAMILIES[family])
    return shrink_model(given, ParallelDims(), SEQ_LEN, stages=4)


def compared(families: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    """By family and schedule: the relative error of the loss, and the worst of a gradient over its bound."""
    errors = {}
    for family, schedules in families.items():
        config = small(family)
        whole = expected(config)
        for schedule in schedules:
            model, pipeline = build(config, schedule)
            one = step_batch(0, 0, 1, 1)
            loss = pipeline.run_step_batch(one.micro_batches, one.loss_denominator) / one.loss_denominator
            pipeline.reduce_tied_gradients()
            dist.all_reduce(loss)  # zero but on the last stage's rank
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, gradients_of(model))
            loss_error = abs(float(loss) / whole["losses"][0] - 1)
            errors[f"{family} {schedule}"] = (loss_error, worst_error(ranks, whole["first"]))
    return errors


def wrong(families: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    found = run_processes(2, compared, families)[0]
    assert len(found) == sum(map(len, families.values()))
    return {name: errors for name, errors in found.items() if not (errors[0] < 1e-5 and errors[1] <= 1.0)}


@pytest.mark.parametrize("first", one_in(2, [0, 10]))
def test_every_family_under_one_schedule(first: int) -> None:
    """Ten at a time."""
    one = {family: [SCHEDULES[at % len(SCHEDULES)]] for at, family in enumerate(FAMILIES)}
    assert wrong(dict(list(one.items())[first : first + 10])) == {}


@pytest.mark.exhaustive
def test_every_family_under_every_schedule() -> None:
    assert wrong(dict.fromkeys(FAMILIES, SCHEDULES)) == {}
