"""The traced bubble of every pipeline schedule over the theoretical one: 4 ranks, 8 and 16 micro-batches.

The product's stages and torch's schedules run for real, on 4 processes with gloo, hidden states handed from stage to
stage; only compute is replaced by sleeps, so that two cores can hold any number of stages. A sleep is calibrated: it
ends when its time is up on the clock, whatever it began late by. Traced is the share of the ranks' time, from the first
start to the last end, in which no rank's stage works; theoretical is the same with messages that take no time
(:func:`mgpu_pipe.parallel.pipeline_timing.theoretical_bubble`). The best of several step batches counts, for others are
disturbed by what else the machine does. ``python -m benchmarks.pipeline_bubble [milliseconds a unit] [step_batches]``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import run_group
from benchmarks.support import finish

RANKS, SIZES = 4, (8, 16)
BOUNDARY = (1, 16, 64)
UNIT_MS, WINDOWS = 200.0, 2
FIRST_S = 0.001
"""A unit of the step batch that is left out."""


class Sleeps:
    """Stands in for a stage's compute, and notes when it works."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s = unit_s
        self.spans: list[tuple[float, float]] = []

    def work(self) -> None:
        start = time.monotonic()  # one clock for all processes of a machine
        while (left := start + self.unit_s - time.monotonic()) > 0:
            time.sleep(left)
        self.spans.append((start, time.monotonic()))


class _Inputs(torch.autograd.Function):
    """A unit of forward pass, and a unit of the gradient of the inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, sleeps: Sleeps) -> torch.Tensor:
        ctx.sleeps = sleeps
        sleeps.work()
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.sleeps.work()
        return gradient.clone(), None


class _Weights(torch.autograd.Function):
    """A unit of the gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sleeps: Sleeps) -> torch.Tensor:
        ctx.sleeps = sleeps
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.sleeps.work()
        return gradient, None


class Stage(torch.nn.Module):
    """The parameters of a stage that sleeps; the first one's inputs are a parameter, as an embedding's are."""

    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(BOUNDARY))
        self.weight = torch.nn.Parameter(torch.zeros(BOUNDARY[-1]))
        self.sleeps = sleeps

    def run(self, last: bool, received: torch.Tensor | None, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.embedding if received is None else received
        result = _Inputs.apply(hidden, self.sleeps) + _Weights.apply(self.weight, self.sleeps)
        return result.double().sum() if last else result


def measure(cases: list[tuple[str, int]], unit_s: float, step_batches: int) -> list[list[list[tuple[float, float]]]]:
    """The spans in which this rank worked, by case and step batch."""
    from functools import partial

    from mgpu_pipe.parallel.pipeline_schedule import ScheduledStage, build_schedule
    from mgpu_pipe.parallel.pipeline_streams import stages_by_rank

    found = []
    for name, micro_batches in cases:
        held = stages_by_rank(name, RANKS)
        number = sum(map(len, held))
        sleeps = Sleeps(unit_s)
        stages: list[ScheduledStage] = []
        for index in held[dist.get_rank()]:
            module = Stage(sleeps)
            assert dist.group.WORLD is not None
            ScheduledStage(
                module,
                index,
                number,
                torch.device("cpu"),
                dist.group.WORLD,
                partial(module.run, index == number - 1),
                BOUNDARY,
                torch.float32,
                stages,
            )
        schedule = build_schedule(name, stages, micro_batches, lambda loss, _: loss * 1.0)
        spans = []
        for step_batch in range(step_batches + 1):
            sleeps.spans, sleeps.unit_s = [], unit_s if step_batch else FIRST_S
            dist.barrier()
            schedule.step(target=torch.empty(micro_batches), return_outputs=False)
            spans.append(sleeps.spans)
        found.append(spans[1:])  # the first one opens connections
    return found


def traced_bubble(by_rank: list[list[tuple[float, float]]]) -> float:
    everything = [span for spans in by_rank for span in spans]
    length = max(end for _, end in everything) - min(start for start, _ in everything)
    return 1.0 - sum(end - start for start, end in everything) / (length * len(by_rank))


def main() -> None:
    from mgpu_pipe.parallel.pipeline_streams import SCHEDULES
    from mgpu_pipe.parallel.pipeline_timing import theoretical_bubble

    unit_ms = float(sys.argv[1]) if len(sys.argv) > 1 else UNIT_MS
    step_batches = int(sys.argv[2]) if len(sys.argv) > 2 else WINDOWS
    cases = [(name, micro_batches) for name in SCHEDULES for micro_batches in SIZES]
    by_rank = run_group(RANKS, measure, cases, unit_ms / 1000, step_batches)
    rows = []
    for number, (name, micro_batches) in enumerate(cases):
        traced = [traced_bubble([rank[number][step_batch] for rank in by_rank]) for step_batch in range(step_batches)]
        ideal = theoretical_bubble(name, RANKS, micro_batches)
        rows.append([name, micro_batches, 100 * ideal, 100 * min(traced), min(traced) / ideal, max(traced) / ideal])
    out = finish(
        "pipeline_bubble",
        "The bubble of pipeline schedules, traced over theoretical",
        ["schedule", "micro-batches", "theoretical %", "traced %", "ratio", "worst ratio"],
        rows,
        f"{RANKS} processes, gloo; forward, gradient of inputs and of weights {unit_ms:g} ms of sleep each; "
        f"best and worst of {step_batches} windows.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
