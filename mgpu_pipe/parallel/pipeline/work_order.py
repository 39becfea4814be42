"""The order in which every rank of a pipeline works, for each schedule. No torch.

A stream is one rank's list of actions. ``F`` is a forward pass of one stage for one micro-batch, ``B`` its backward
pass. Where a schedule splits that, ``I`` is the gradient of the stage's input and ``W`` those of its weights. The
streams are those that torch's schedules run (a test compares them). So a schedule can be printed, counted and timed
without torch.

The papers are named in :mod:`mgpu_pipe.architectures.formulas.pipeline_schedules`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mgpu_pipe.architectures.formulas.pipeline_schedules import (
    SCHEDULES,
    StageContent,
    StagesPerRank,
    micro_batches_fit,
    rounds,
    stages_by_rank,
)


class Action(NamedTuple):
    """One action of a rank: ``F``, ``B``, ``I`` or ``W`` of a stage for a micro-batch."""

    kind: str
    stage: int
    micro_batch: int


Stream = list[Action]


def streams(schedule: str, ranks: int, micro_batches: int, stages_per_rank: StagesPerRank = "auto") -> list[Stream]:
    """Every rank's stream for one step batch; ValueError for micro-batches that the schedule does not take."""
    if not micro_batches_fit(schedule, ranks, micro_batches):
        raise ValueError(f"{schedule} on {ranks} ranks does not take {micro_batches} micro-batches")
    stages_of_ranks = stages_by_rank(schedule, ranks, stages_per_rank)
    return [_stream(schedule, rank, ranks, stages_of_ranks[rank], micro_batches) for rank in range(ranks)]


def _stream(schedule: str, rank: int, ranks: int, stages: tuple[int, ...], micro_batches: int) -> Stream:
    hops = ranks - 1 - rank  # to the last rank
    if schedule == "gpipe":
        return _alternating(stages, micro_batches, micro_batches, warmup=micro_batches)
    if schedule == "1f1b":
        return _alternating(stages, micro_batches, micro_batches, warmup=hops)
    if schedule == "zbv":
        return _zbv(rank, ranks, stages, micro_batches)
    if schedule == "dualpipev":
        return _dualpipev(rank, ranks, stages, micro_batches)
    a_round = micro_batches // rounds(ranks, micro_batches)
    before_last = (len(stages) - 1) * a_round
    if schedule == "interleaved_1f1b":
        return _alternating(stages, micro_batches, a_round, warmup=before_last + 2 * hops)
    return _alternating(stages, micro_batches, a_round, warmup=before_last + hops, weights_behind=rank)


def _in_rounds(stages: Sequence[int], micro_batches: int, a_round: int) -> list[tuple[int, int]]:
    """Depth first: each stage takes a round's micro-batches, then the next stage takes them."""
    return [
        (stage, micro_batch)
        for start in range(0, micro_batches, a_round)
        for stage in stages
        for micro_batch in range(start, start + a_round)
    ]


def _alternating(
    stages: tuple[int, ...], micro_batches: int, a_round: int, warmup: int, weights_behind: int | None = None
) -> Stream:
    """``warmup`` forward passes, then forward and backward in turn; ``weights_behind`` ``I`` go before the first
    ``W``."""
    forwards = _in_rounds(stages, micro_batches, a_round)
    backwards = _in_rounds(stages[::-1], micro_batches, a_round)
    warmup = min(warmup, len(forwards))
    stream = [Action("F", *forward) for forward in forwards[:warmup]]
    later = deque(forwards[warmup:])
    for index, backward in enumerate(backwards):
        if later:
            stream.append(Action("F", *later.popleft()))
        stream.append(Action("B" if weights_behind is None else "I", *backward))
        if weights_behind is not None and index >= weights_behind:
            stream.append(Action("W", *backwards[index - weights_behind]))
    if weights_behind:
        stream += [Action("W", *backward) for backward in backwards[-weights_behind:]]
    return stream


class _Emitter:
    """Appends a rank's actions, each kind of each stage taking its micro-batches in order."""

    def __init__(self) -> None:
        self.stream: Stream = []
        self.done: Counter[tuple[str, int]] = Counter()

    def emit(self, stage: int, *kinds: str) -> None:
        for kind in kinds:
            self.stream.append(Action(kind, stage, self.done[kind, stage]))
            self.done[kind, stage] += 1


def _zbv(rank: int, ranks: int, stages: tuple[int, ...], micro_batches: int) -> Stream:
    """ZB-V: down and up the V; with fewer micro-batches than fill it, the others' actions are dropped at the end."""
    down, up = stages
    filled = max(2 * ranks - 1, micro_batches)
    rows = _Emitter()
    for _ in range(2 * (ranks - rank) - 1):
        rows.emit(down, "F")
    for _ in range(rank):
        rows.emit(up, "F")
        rows.emit(down, "F")
    for _ in range(ranks - rank):
        rows.emit(up, "F", "I", "W")
    while rows.done["F", up] < filled:
        if rows.done["F", down] < filled:
            rows.emit(down, "F")
        rows.emit(down, "I", "W")
        rows.emit(up, "F", "I", "W")
    for _ in range(rank):
        rows.emit(down, "I")
        rows.emit(up, "I")
    for _ in range(ranks - rank):
        rows.emit(down, "I", "W")
    for stage in (up, down):
        while rows.done["W", stage] < rows.done["I", stage]:
            rows.emit(stage, "W")
    return [action for action in rows.stream if action.micro_batch < micro_batches]


class _DualEmitter(_Emitter):
    """Backward passes are whole or split; the weights of split ones wait in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[Action] = deque()

    def backward(self, stage: int, split: bool) -> None:
        # Whole and split ones share one count.
        action = Action("I" if split else "B", stage, self.done["backward", stage])
        self.done["backward", stage] += 1
        self.stream.append(action)
        if split:
            self.waiting.append(action._replace(kind="W"))

    def weights(self) -> None:
        if self.waiting:
            self.stream.append(self.waiting.popleft())


def _dualpipev(rank: int, ranks: int, stages: tuple[int, ...], micro_batches: int) -> Stream:
    """DualPipeV in its eight steps."""
    down, up = stages
    hops = ranks - 1 - rank
    rows = _DualEmitter()
    for _ in range(2 * hops):
        rows.emit(down, "F")
    for _ in range(rank + 1):
        rows.emit(down, "F")
        rows.emit(up, "F")
    for _ in range(hops):
        rows.backward(up, split=True)
        rows.weights()
        rows.emit(up, "F")
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        rows.emit(down, "F")
        rows.backward(up, split=False)
        rows.emit(up, "F")
        rows.backward(down, split=False)
    for _ in range(hops):
        rows.backward(up, split=False)
        rows.emit(up, "F")
        rows.backward(down, split=False)
    half = (rank + 1) // 2
    for turn in range(rank + 1):
        # Weights are kept for the end from the middle on; odd ranks begin half a turn earlier.
        rows.backward(up, split=turn > half or (turn == half and rank % 2 == 1))
        rows.backward(down, split=turn >= half)
    for _ in range(hops):
        rows.weights()
        rows.backward(down, split=True)
    for _ in range(rank + 1):
        rows.weights()
    return rows.stream


EQUAL = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""The papers' unit: a forward pass and each half of a backward pass take one."""


@dataclass(frozen=True)
class Timed:
    """An action, when it starts and when it ends."""

    action: Action
    start: float
    end: float


def timeline(by_rank: Sequence[Stream], durations: Mapping[str, float] = EQUAL) -> list[list[Timed]]:
    """Every rank's actions with their times.

    Args:
        durations: of one stage's ``F``, ``I``, ``W`` and ``B``, in any unit.

    Raises:
        ValueError: streams that wait for one another for ever.
    """
    ends: dict[Action, float] = {}
    last = max(action.stage for stream in by_rank for action in stream)
    rows: list[list[Timed]] = [[] for _ in by_rank]
    left = sum(map(len, by_rank))
    while left:
        before = left
        for stream, timed in zip(by_rank, rows, strict=True):
            while len(timed) < len(stream):
                action = stream[len(timed)]
                needed = [next((ends[need] for need in any_of if need in ends), None) for any_of in needs(action, last)]
                if None in needed:
                    break
                free = timed[-1].end if timed else 0.0
                start = max([free, *(end for end in needed if end is not None)])
                ends[action] = start + durations[action.kind]
                timed.append(Timed(action, start, ends[action]))
                left -= 1
        if left == before:
            stuck = [
                str(stream[len(timed)]) for stream, timed in zip(by_rank, rows, strict=True) if len(timed) < len(stream)
            ]
            raise ValueError(f"the streams wait for one another: {', '.join(stuck)}")
    return rows


def needs(action: Action, last_stage: int) -> list[tuple[Action, ...]]:
    """Actions that must end before ``action`` starts: one of each tuple (a backward pass may be whole or split)."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [(Action("F", stage - 1, micro_batch),)] if stage else []
    if kind == "W":
        return [(Action("I", stage, micro_batch),)]
    forward = (Action("F", stage, micro_batch),)
    if stage == last_stage:
        return [forward]
    return [forward, (Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch))]


def bubble_of(timed: Sequence[Sequence[Timed]]) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they do nothing."""
    everything = [entry for row in timed for entry in row]
    span = max(entry.end for entry in everything) - min(entry.start for entry in everything)
    return 1.0 - sum(entry.end - entry.start for entry in everything) / (span * len(timed))


def most_in_flight(stream: Stream) -> int:
    """The most forward passes, over all stages of a rank, whose backward pass has not started."""
    most = now = 0
    for action in stream:
        now += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        most = max(most, now)
    return most


def forward_slots(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: StagesPerRank = "auto"
) -> list[Stream]:
    """Forward passes of each time slot alone, at most one a rank; ranks take the latest ready stage first."""
    stages_of_ranks = stages_by_rank(schedule, ranks, stages_per_rank)
    last = sum(map(len, stages_of_ranks)) - 1
    done = [0] * (last + 1)  # micro-batches that each stage has finished
    slots: list[Stream] = []
    while done[last] < micro_batches:
        ready = [done[stage] < (done[stage - 1] if stage else micro_batches) for stage in range(last + 1)]
        chosen = [max((stage for stage in stages if ready[stage]), default=None) for stages in stages_of_ranks]
        slot = [Action("F", stage, done[stage]) for stage in sorted(s for s in chosen if s is not None)]
        for action in slot:
            done[action.stage] += 1
        slots.append(slot)
    return slots


PICTURE_WIDTH = 100
"""Characters of a line of a schedule's picture."""
IDLE = "."
LEGEND = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def pipeline_picture(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: StagesPerRank = "auto", width: int = PICTURE_WIDTH
) -> list[str]:
    """Lines of at most ``width`` columns: a row per rank with a cell per unit of time, then a legend.

    A forward pass and each half of a backward pass take one unit. Cells are ``F0 B0 ...`` with the micro-batch's
    number if that fits, else only letters. Letters of a rank's second, fourth, ... stage are lower case. A picture that
    is still too wide loses its middle.
    """
    by_rank = streams(schedule, ranks, micro_batches, stages_per_rank)
    stages_of_ranks = stages_by_rank(schedule, ranks, stages_per_rank)
    timed = timeline(by_rank)
    span = int(max(entry.end for row in timed for entry in row))
    label_width = len(f"rank {ranks - 1}  ")
    cell = len(f"F{micro_batches - 1} ")
    numbered = label_width + span * cell <= width
    rows = [_cells(row, span, stages_of_ranks[rank], numbered, cell) for rank, row in enumerate(timed)]
    room = width - label_width
    if not numbered and span > room:
        side = (room - 5) // 2
        rows = [f"{row[:side]} ... {row[-side:]}" for row in rows]
    lines = [f"{f'rank {rank}':<{label_width}}{row}".rstrip() for rank, row in enumerate(rows)]
    kinds = sorted({action.kind for stream in by_rank for action in stream}, key="FBIW".index)
    legend = ", ".join(f"{kind} {LEGEND[kind]}" for kind in kinds)
    case_note = "; small letters: second stage" if len(stages_of_ranks[0]) > 1 else ""
    return [*lines, f"{legend}, {IDLE} idle{case_note}"]


def _cells(row: Sequence[Timed], span: int, stages: Sequence[int], numbered: bool, width: int) -> str:
    cells = [IDLE] * span
    for (kind, stage, micro_batch), start, end in ((entry.action, entry.start, entry.end) for entry in row):
        letter = kind.lower() if stages.index(stage) % 2 else kind
        for time in range(int(start), int(end)):
            cells[time] = f"{letter}{micro_batch}" if numbered else letter
    return "".join(f"{text:<{width}}" for text in cells) if numbered else "".join(cells)


def schedule_lines(
    schedule: str,
    ranks: int,
    micro_batches: int,
    contents: Sequence[StageContent],
    stages_per_rank: StagesPerRank = "auto",
    width: int = PICTURE_WIDTH,
) -> list[str]:
    """Lines with the picture, the bubble, the micro-batches in flight, and each stage's contents."""
    by_rank = streams(schedule, ranks, micro_batches, stages_per_rank)
    bubble = bubble_of(timeline(by_rank))
    each = len(stages_by_rank(schedule, ranks, stages_per_rank)[0])
    most = max(map(most_in_flight, by_rank))
    in_flight = f"{most} micro-batches" if each == 1 else f"{most} passes of a stage"
    split = ", gradients of inputs and weights apart" if SCHEDULES[schedule].splits_backward else ""
    return [
        f"{schedule}, {ranks} ranks of {each} stage{'s' if each > 1 else ''}, {micro_batches} micro-batches{split}",
        *pipeline_picture(schedule, ranks, micro_batches, stages_per_rank, width),
        f"bubble {bubble:.1%} of the step, if all stages were equally fast; at most {in_flight} in flight on a rank",
        *(content.describe() for content in contents),
    ]
