"""Oracle: the collectives and bytes that the benchmarks counted on every process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.traffic import axes_bytes, expert_bytes
from benchmarks.traffic.closed_forms import expert_traffic
from mgpu_pipe.architectures.formulas.traffic import all_reduced, exchanged
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.models.fields import resolved_fields
from tests.support.processes import run_processes
from tests.support.sampling import sampled

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def counted(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}-cpu.json").read_text())["rows"]


@pytest.mark.parametrize("axes", axes_bytes.CASES)
def test_a_step_on_these_axes_sends_what_was_counted(axes: str) -> None:
    case, fields = axes_bytes.CASES[axes], resolved_fields(compose([f"model={axes_bytes.MODEL}"])[0].model)
    calls, sent = Counter[str](), Counter[str]()
    for stage in range(case.pp):
        for name, (number, size) in axes_bytes.closed_form(case, stage, fields).items():
            calls[name] += number * case.world // case.pp
            sent[name] += int(size * case.world // case.pp)
    rows = {row["collective"]: row for row in counted("axes_bytes") if row["axes"] == axes}
    assert dict(calls) == {name: row["calls"] for name, row in rows.items()}
    assert dict(sent) == {name: row["sent bytes"] for name, row in rows.items()}


@pytest.mark.slow
@pytest.mark.parametrize("axes", sampled([(axes,) for axes in axes_bytes.CASES], lambda axes: axes == "tp2 x cp2"))
def test_a_step_sends_what_the_closed_form_says(axes: str) -> None:
    case, fields = axes_bytes.CASES[axes], resolved_fields(compose([f"model={axes_bytes.MODEL}"])[0].model)
    for (found,) in run_processes(case.world, axes_bytes.measure, [case]):
        expected = axes_bytes.closed_form(case, found["stage"], fields)
        assert {name: (found["calls"][name], found["sent"][name]) for name in found["calls"]} == expected


def test_expert_parallelism_sends_what_was_counted() -> None:
    rows = counted("expert_bytes")
    config = expert_bytes.CONFIG
    passes = config["num_hidden_layers"] * expert_bytes.MICRO_BATCHES
    for world in {row["processes"] for row in rows}:
        by_name = {row["collective"]: row for row in rows if row["processes"] == world}
        elsewhere = by_name["dispatch_tokens"]["sent bytes"] // (4 * config["hidden_size"])
        expected = expert_traffic(passes, config["num_local_experts"], config["hidden_size"], world, elsewhere)
        assert expected == {name: (row["calls"], row["sent bytes"]) for name, row in by_name.items()}


def test_a_ring_sends_nothing_alone_and_all_but_its_part_together() -> None:
    assert exchanged(12, 1) == all_reduced(12, 1) == 0
    assert (exchanged(12, 4), all_reduced(12, 4)) == (9, 18)
