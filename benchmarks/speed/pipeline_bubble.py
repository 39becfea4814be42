"""The traced bubble of every pipeline schedule over the theoretical one: 4 ranks, 8 and 16 micro-batches.

The product's stages and torch's schedules run for real, on 4 processes with gloo, hidden states handed from stage to
stage; only compute is replaced by sleeps, so that two cores can hold any number of stages. A sleep is calibrated: it
ends when its time is up on the clock, whatever it began late by. Traced is the share of the ranks' time, from the first
start to the last end, in which no rank's stage works; theoretical is the same with messages that take no time
(:func:`theoretical_bubble`). The best of several step batches counts, for
others are disturbed by what else the machine does.

What Python and gloo do between two actions is idle time, too, about a millisecond an action however long that is:
*host* tells it apart. Schedules without a bubble to speak of have longer actions, so that the ratio is the schedule's
and not gloo's. ``python -m benchmarks.speed.pipeline_bubble [milliseconds a unit] [step_batches]`` gives all the same.
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
from mgpu_pipe.architectures.formulas.pipeline_schedules import StagesPerRank
from mgpu_pipe.parallel.pipeline.work_order import EQUAL, bubble_of, streams, timeline

RANKS, SIZES = 4, (8, 16)
BOUNDARY = (1, 16, 64)
UNIT_MS, ZERO_BUBBLE_UNIT_MS, WINDOWS = 200.0, 1000.0, 2
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
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sleeps.work()
        return gradient.clone(), None


class _Weights(torch.autograd.Function):
    """A unit of the gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sleeps: Sleeps) -> torch.Tensor:
        ctx.sleeps = sleeps
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
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


def theoretical_bubble(
    schedule: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: StagesPerRank = "auto",
    durations: Mapping[str, float] = EQUAL,
) -> float:
    """The bubble of a schedule whose stages all take the same time.

    It is ``(p-1) / (m+p-1)`` for GPipe and 1F1B and ``(p-1) / (v*m+p-1)`` for interleaved 1F1B, where ``m`` is a
    multiple of ``p`` (arXiv:2104.04473); the others have no closed form for every size, and are simulated.
    """
    return bubble_of(timeline(streams(schedule, ranks, micro_batches, stages_per_rank), durations))


def measure(cases: list[tuple[str, int, float]], step_batches: int) -> list[list[list[tuple[float, float]]]]:
    """The spans in which this rank worked, by case and step batch."""
    from functools import partial

    from mgpu_pipe.architectures.formulas.pipeline_schedules import stages_by_rank
    from mgpu_pipe.parallel.pipeline.schedule import ScheduledStage, build_schedule

    found = []
    for name, micro_batches, unit_s in cases:
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


def host_seconds(by_rank: list[list[tuple[float, float]]], ideal: float) -> float:
    """An action, on the mean: what a step batch takes longer than its work and the ideal bubble."""
    everything = [span for spans in by_rank for span in spans]
    length = max(end for _, end in everything) - min(start for start, _ in everything)
    work = sum(end - start for start, end in everything) / len(by_rank)
    return (length - work / (1.0 - ideal)) * len(by_rank) / len(everything)


def main() -> None:
    from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES

    given = float(sys.argv[1]) if len(sys.argv) > 1 else None
    step_batches = int(sys.argv[2]) if len(sys.argv) > 2 else WINDOWS
    units = {name: given or (ZERO_BUBBLE_UNIT_MS if of.splits_backward else UNIT_MS) for name, of in SCHEDULES.items()}
    cases = [(name, micro_batches, units[name] / 1000) for name in SCHEDULES for micro_batches in SIZES]
    by_rank = run_group(RANKS, measure, cases, step_batches)
    rows = []
    for number, (name, micro_batches, unit_s) in enumerate(cases):
        spans = [[rank[number][step_batch] for rank in by_rank] for step_batch in range(step_batches)]
        traced, ideal = [*map(traced_bubble, spans)], theoretical_bubble(name, RANKS, micro_batches)
        host_ms = 1000 * min(host_seconds(of, ideal) for of in spans)
        rows.append(
            [name, micro_batches, 1000 * unit_s, 100 * ideal, 100 * min(traced)]
            + [min(traced) / ideal, max(traced) / ideal, host_ms]
        )
    out = finish(
        "pipeline_bubble",
        "The bubble of pipeline schedules, traced over theoretical",
        ["schedule", "micro-batches", "unit ms", "theoretical %", "traced %", "ratio", "worst ratio", "host ms"],
        rows,
        f"{RANKS} processes, gloo; forward, gradient of inputs and of weights a unit of sleep each; host: an "
        f"action, beyond the ideal; best and worst of {step_batches} windows.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
