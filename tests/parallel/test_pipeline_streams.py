"""Oracles: torch's own schedules, and the ordering rules and closed forms of the papers. No processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.speed.pipeline_bubble import theoretical_bubble
from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, micro_batches_fit, stages_by_rank
from mgpu_pipe.parallel.pipeline.work_order import (
    Action,
    bubble_of,
    forward_slots,
    most_in_flight,
    needs,
    streams,
    timeline,
)

SIZES = [(ranks, count) for ranks in (2, 3, 4, 6) for count in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)]
FITTING = [(name, *size) for name in SCHEDULES for size in SIZES if micro_batches_fit(name, *size)]


class Stage:
    """What a schedule asks of a stage, which notes what it is told to do and has no one to talk to."""

    has_backward = True
    submod = None

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, index % ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.told: list[Action] = []

    def no_messages(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.told.append(Action("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **kwargs: Any) -> None:
        self.told.append(Action("B", self.stage_index, micro_batch))

    def perform_reduce_grad(self, scale: int) -> None:
        assert scale == 1


def torch_order(name: str, ranks: int, micro_batches: int, each: int) -> list[list[Action]]:
    """What torch's schedule does on each rank, idle slots and what only concerns sharding left out."""
    from mgpu_pipe.parallel.pipeline.schedule import MULTI, SINGLE

    if name in SINGLE:  # these run what their code says; their printed order of 1F1B is off by one on the last rank
        found = []
        for rank in range(ranks):
            stage: Any = Stage(rank, ranks, ranks)
            schedule: Any = SINGLE[name](stage, micro_batches, loss_fn=lambda *_: None, scale_grads=False)
            schedule._initialize_stage = lambda *_: None
            schedule._step_microbatches(target_mbs=[None] * micro_batches)
            found.append(stage.told)
        return found
    stages: Any = [Stage(index, ranks * each, ranks) for index in stages_by_rank(name, ranks, each)[0]]
    schedule = MULTI[name](stages, micro_batches, loss_fn=lambda *_: None)

    def flat(action: Any) -> list[Action]:
        if action is None:
            return []
        if action.sub_actions:
            return [entry for part in action.sub_actions for entry in flat(part)]
        return [Action(action.computation_type.value, action.stage_index, action.microbatch_index)]

    return [[entry for action in schedule.pipeline_order[rank] for entry in flat(action)] for rank in range(ranks)]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_streams_are_those_that_torch_runs(name: str) -> None:
    sizes = [(ranks, count) for other, ranks, count in FITTING if other == name]
    assert len(sizes) > 10
    for ranks, count in sizes:
        for each in (2, 3) if SCHEDULES[name].more_stages else (SCHEDULES[name].stages_per_rank,):
            assert streams(name, ranks, count, each) == torch_order(name, ranks, count, each), (ranks, count, each)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_numbers_of_micro_batches_that_do_not_fit_are_those_torch_refuses(name: str) -> None:
    each = SCHEDULES[name].stages_per_rank
    for ranks, count in SIZES:
        if not micro_batches_fit(name, ranks, count):
            with pytest.raises(ValueError):
                torch_order(name, ranks, count, each)
            with pytest.raises(ValueError, match=f"does not take {count} micro-batches"):
                streams(name, ranks, count)


@pytest.mark.parametrize(("name", "ranks", "count"), FITTING)
def test_streams_keep_the_rules_of_the_papers(name: str, ranks: int, count: int) -> None:
    by_rank = streams(name, ranks, count)
    held = stages_by_rank(name, ranks)
    last = sum(map(len, held)) - 1
    timed = timeline(by_rank)  # raises where ranks would wait for one another
    end = {entry.action: entry.end for row in timed for entry in row}
    everything = [action for stream in by_rank for action in stream]
    assert len(set(everything)) == len(everything)
    for stream, row, stages in zip(by_rank, timed, held, strict=True):
        assert {action.stage for action in stream} == set(stages)
        # At most one action at a time.
        assert all(one.end <= other.start for one, other in itertools.pairwise(row))
        for stage in stages:
            for micro_batch in range(count):
                kinds = [action.kind for action in stream if action[1:] == (stage, micro_batch)]
                # Each once, forward first; W after I.
                assert kinds in (["F", "B"], ["F", "I", "W"])
            for kind in "FBIW":
                order = [action.micro_batch for action in stream if action[:2] == (kind, stage)]
                assert order == sorted(order)
        for entry in row:
            for any_of in needs(entry.action, last):
                assert max(end.get(need, 0.0) for need in any_of) <= entry.start


@pytest.mark.parametrize(("name", "ranks", "count"), [case for case in FITTING if "interleaved" not in case[0]])
def test_micro_batches_in_flight_are_bounded(name: str, ranks: int, count: int) -> None:
    bounds = {
        "gpipe": [count] * ranks,
        "1f1b": [min(ranks - rank, count) for rank in range(ranks)],
        # A rank's stages are half as large: twice the ranks are as much memory as 1F1B's first rank holds.
        "zbv": [min(2 * ranks, 2 * count)] * ranks,
        "dualpipev": [2 * ranks + 1] * ranks,
    }
    most = [most_in_flight(stream) for stream in streams(name, ranks, count)]
    assert all(found <= bound for found, bound in zip(most, bounds[name], strict=True))
    if name in ("gpipe", "1f1b"):
        assert most == bounds[name]


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("rounds", [2, 4])
def test_bubbles_are_the_closed_forms(ranks: int, rounds: int) -> None:
    count = ranks * rounds
    for name in ("gpipe", "1f1b"):
        assert theoretical_bubble(name, ranks, count) == pytest.approx((ranks - 1) / (count + ranks - 1))
    for each in (2, 3):
        interleaved = theoretical_bubble("interleaved_1f1b", ranks, count, each)
        assert interleaved == pytest.approx((ranks - 1) / (each * count + ranks - 1))
    # ZB-H1 leaves a third of 1F1B's bubble (arXiv:2401.10241, table 1), here over stages of half the size.
    idle, work = (ranks - 1), 3 * 2 * count
    for name in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        if micro_batches_fit(name, ranks, count) and count >= 2 * ranks - 1:
            assert theoretical_bubble(name, ranks, count) == pytest.approx(idle / (work + idle))


def test_a_stream_that_waits_for_itself_is_found() -> None:
    by_rank = streams("1f1b", 2, 4)
    by_rank[1].reverse()
    with pytest.raises(ValueError, match="wait for one another"):
        timeline(by_rank)


def test_a_bubble_is_the_idle_share_of_all_ranks() -> None:
    timed = timeline([[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]])
    assert bubble_of(timed) == 0.5


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_forward_slots_run_everything_once_in_order_and_overlap(name: str) -> None:
    ranks, count = 4, 6
    slots = forward_slots(name, ranks, count)
    held = stages_by_rank(name, ranks)
    place = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    at = {action: slot for slot, actions in enumerate(slots) for action in actions}
    assert len(at) == sum(map(len, slots)) == len(place) * count
    for actions in slots:
        assert len({place[action.stage] for action in actions}) == len(actions)
    for action, slot in at.items():
        assert action.stage == 0 or at[action._replace(stage=action.stage - 1)] < slot
    # Far below one after the other, which would take a slot for every action.
    assert len(slots) <= count * len(held[0]) + 2 * len(place)
    assert forward_slots(name, ranks, 0) == []
