"""A pipeline schedule as a picture in text, with its bubble and what each stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.architectures.formulas.layer_split import StageContent
from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, StagesPerRank, stages_by_rank
from mgpu_pipe.parallel.pipeline.work_order import Timed, bubble_of, most_in_flight, streams, timeline

WIDTH = 100
IDLE = "."
LEGEND = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def pipeline_picture(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: StagesPerRank = "auto", width: int = WIDTH
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
    width: int = WIDTH,
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
