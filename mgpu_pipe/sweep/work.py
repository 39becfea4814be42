"""The work on a sweep: one process takes a point that nobody has, runs it, and takes the next."""

from __future__ import annotations

import itertools
import math
import shlex
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from mgpu_pipe.config import hydra_cli
from mgpu_pipe.config.compose import Composition
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, MgpuError
from mgpu_pipe.launch import fork_server
from mgpu_pipe.launch.composed import WORST_LAST, checked, launched
from mgpu_pipe.launch.stop import run_begins, run_ended, stop_requested
from mgpu_pipe.runs.continue_line import this_program
from mgpu_pipe.sweep.outcome import ended, ended_with, killed_for_memory, refused, say_in_run
from mgpu_pipe.sweep.point import FAILED, FINISHED, GOES_ON, PAUSED, PRUNED, RUNNING, Point, me
from mgpu_pipe.sweep.pruning import promoted
from mgpu_pipe.sweep.search import Tried, suggest
from mgpu_pipe.sweep.space import from_record
from mgpu_pipe.sweep.store import Store

POLL_S = 0.2
TABLE_ROWS = 50
"""Runs that the table at a sweep's end reads whole."""


def work(store: Store, command: Sequence[str], numbers: Collection[int] = ()) -> int:
    """Run what waits and what was interrupted, until nothing is left, or a signal stops it.

    Args:
        command: what the user typed, for the runs' records.
        numbers: of the points to run; none: all.

    Returns:
        the worst exit code of the sweep's points; 75 where some were not run.
    """
    from mgpu_pipe.sweep import parallel

    if parallel.is_worker():
        numbers = parallel.chosen_points()
    elif store.asked["parallel"] > 1:
        parallel.work_together(store, numbers)
        return conclude(store)
    with fork_server.kept():
        _work(store, command, numbers)
    return EXIT_OK if parallel.is_worker() else conclude(store)


def _work(store: Store, command: Sequence[str], numbers: Collection[int]) -> None:
    tried: set[int] = set()
    while not stop_requested():
        point = take_next(store, tried, numbers)
        if point is None and _awaits_others(store, numbers):
            time.sleep(POLL_S)
            continue
        if point is None:
            break
        tried.add(point.number)  # one whose worker is killed time and again does not keep the others waiting
        total = max(len(store.points()), store.asked["trials"] if store.asked["search"] != "grid" else 0)
        until = f" to step {point.budget}" if store.asked["rungs"] else ""
        print(f"run {point.number} of {total}{until}: {shlex.join(point.overrides)}", file=sys.stderr, flush=True)
        if _run(store, point, command) == EXIT_STOPPED:
            break


def conclude(store: Store) -> int:
    """Say how a sweep stands: its table, its report, and the command that goes on; returns the exit code."""
    from mgpu_pipe.launch.sweep_end import show_sweep
    from mgpu_pipe.sweep.page import write_sweep_page

    points = _settled(store)
    left = [point for point in points if point.status in GOES_ON]
    running = [point for point in points if point.status == RUNNING]
    if left:
        print(f"{len(left)} of {len(points)} runs are left, because the sweep was stopped", file=sys.stderr)
    for point in running:
        print(f"run {point.number} is under way in another process ({point.owner.split(':')[1]})", file=sys.stderr)
    folders = [RunPaths(Path(point.folder)) for point in points if point.folder]
    if folders:
        show_sweep(folders[:TABLE_ROWS], lambda: write_sweep_page(store), resume_line(store) if left else "")
    print(f"sweep: {store.folder}", flush=True)
    codes = [point.exit_code for point in points if point.status not in GOES_ON]
    return max([*codes, EXIT_STOPPED if left else EXIT_OK], key=WORST_LAST.index)


def _settled(store: Store) -> list[Point]:
    """The points; those that no rung promotes any more, because nothing else is to come, are pruned for good."""
    points = store.points()
    grid = store.asked["search"] == "grid"
    open_ones = any(point.status in (RUNNING, *GOES_ON) for point in points)
    if open_ones or stop_requested() or not (grid or len({point.trial for point in points}) >= store.asked["trials"]):
        return points
    for point in points:
        if point.status == PAUSED and store.change(point, status=PRUNED):
            say_in_run(RunPaths(Path(point.folder)), status=PRUNED)
    return store.points()


def resume_line(store: Store, verb: str = "resume") -> str:
    """The command that goes on with a sweep."""
    return shlex.join([*this_program(), "sweeps", verb, store.name, f"run.root={store.folder.parents[1]}"])


def parsed_again(flags: Sequence[str], overrides: Sequence[str]) -> Namespace:
    """A command line of Hydra's, as it was typed."""
    return hydra_cli.parse([*flags, *overrides])


def take_next(store: Store, tried: Collection[int], numbers: Collection[int] = ()) -> Point | None:
    """The next point to run, made this process's: one that is open, one that a rung promotes, or a new one.

    Args:
        tried: numbers of those that this process has run to an end already.
        numbers: of the points to run; none: all.
    """
    while not store.cancelled:
        points = store.points()
        first = next(iter(store.asked["rungs"]), 0)
        for point in points:
            wanted = point.status in GOES_ON and point.number not in tried and (not numbers or point.number in numbers)
            if wanted and (taken := take(store, point, budget=point.budget or first)) is not None:
                return taken
        if numbers:
            return None
        for point, budget in _promoted(store, points):
            if (taken := take(store, point, budget=budget)) is not None:
                return taken
        if store.asked["search"] == "grid" or len({point.trial for point in points}) >= store.asked["trials"]:
            last = _best_paused(store, points)
            return None if last is None else take(store, last[0], budget=last[1])
        chosen = suggest(
            store.asked["search"],
            from_record(store.asked["space"]),
            so_far(store, points),
            store.asked["minimize"],
            store.asked["seed"],
        )
        runs = with_seeds(
            [f"{key}={value}" for key, value in chosen.items()], store.asked["seed"], store.asked["seeds"]
        )
        store.add([runs], after=points[-1].number if points else 0)
    return None


def with_seeds(overrides: Sequence[str], seed: int, seeds: int) -> list[list[str]]:
    """A trial's runs: one, or one for each seed."""
    return [[*overrides, f"seed={seed + at}"] for at in range(seeds)] if seeds > 1 else [list(overrides)]


def so_far(store: Store, points: Sequence[Point]) -> list[Tried]:
    """The trials, as a search is told them; of several seeds the mean."""
    by_trial: dict[int, list[Point]] = {}
    for point in points:
        by_trial.setdefault(point.trial, []).append(point)
    keys = {record["key"] for record in store.asked["space"]}
    tried = []
    for runs in by_trial.values():
        chosen = {key: value for key, value in runs[0].settings.items() if key in keys}
        columns = [[run.metric(metric) for run in runs] for metric in store.asked["metrics"]]
        whole = all(run.status == FINISHED for run in runs) and not any(map(math.isnan, itertools.chain(*columns)))
        values = [math.fsum(column) / len(column) for column in columns] if whole else []
        ended = not any(run.status in (RUNNING, *GOES_ON) for run in runs)
        tried.append(Tried(chosen, values, ended, runs[0].rungs))
    return tried


def _promoted(store: Store, points: Sequence[Point]) -> Iterator[tuple[Point, int]]:
    rungs = store.asked["rungs"]
    if not rungs:
        return
    reached = {point.number: point.rungs for point in points if point.rungs}
    by_number = {point.number: point for point in points}
    for number in promoted(reached, rungs, store.asked["minimize"][0], store.asked["pruner"]):
        point = by_number[number]
        if point.status in (PAUSED, PRUNED):
            yield point, next(rung for rung in rungs if rung > max(point.rungs))


def _best_paused(store: Store, points: Sequence[Point]) -> tuple[Point, int] | None:
    """The run that goes on where a sweep would end without one that was trained whole: the best at the last rung."""
    rungs, paused = store.asked["rungs"], [point for point in points if point.status in (PAUSED, PRUNED)]
    if not paused or any(point.status in (RUNNING, FINISHED, *GOES_ON) for point in points):
        return None
    sign = 1.0 if store.asked["minimize"][0] else -1.0
    best = min(paused, key=lambda point: (-max(point.rungs), sign * point.rungs[max(point.rungs)], point.number))
    return best, next(rung for rung in rungs if rung > max(best.rungs))


def _awaits_others(store: Store, numbers: Collection[int]) -> bool:
    """Whether what other processes run may promote a point or leave room for one."""
    pruning = bool(store.asked["rungs"]) and not numbers
    return pruning and any(point.status == RUNNING for point in store.points())


def take(store: Store, point: Point, budget: int = 0) -> Point | None:
    """Make a point this process's; None where another process was faster."""
    attempts, now = point.attempts + 1, time.time()
    return store.change(point, status=RUNNING, owner=me(), attempts=attempts, begun=now, reason="", budget=budget)


def _run(store: Store, point: Point, command: Sequence[str]) -> int:
    """Run a point that is this process's."""
    parsed = parsed_again(store.asked["flags"], [*store.asked["fixed"], *point.overrides])
    try:
        composition = hydra_cli.compose_one(parsed)
    except MgpuError as error:
        return refused(store, point, error)
    composition.swept = list(point.overrides)
    return run_composed(store, point, composition, command)


def run_composed(store: Store, point: Point, composition: Composition, command: Sequence[str]) -> int:
    """Run a point, in its own folder where it has one already, and record its end; returns the exit code."""
    if point.status != RUNNING:
        point = take(store, point) or point
    run_begins()
    if point.folder:
        composition.config.run.dir, composition.config.checkpoint.resume = point.folder, "auto"
    _limit(composition.config, point.budget)
    began, memory = time.monotonic(), killed_for_memory()

    def chosen(folder: Path) -> None:
        nonlocal point
        point = store.change(point, folder=str(folder)) or point

    try:
        checked(composition, joins=True)
        result = launched(composition, command, chosen)
    except MgpuError as error:
        return refused(store, point, error)
    except Exception as error:  # a defect of this program: shown whole, and the other runs go on
        traceback.print_exc()
        return ended_with(store, point, FAILED, EXIT_FAILURE, repr(error), {}, time.monotonic() - began)
    run_ended(asked_to_stop=result.asked_to_stop)
    if point.folder != str(result.folder):
        chosen(result.folder)
    return ended(store, point, result.exit_code, time.monotonic() - began, killed_for_memory() > memory)


def _limit(config: RunConfig, budget: int) -> None:
    """Let a run train to a rung; its schedule has the whole length."""
    if budget:
        if config.scheduler.total_steps is None:
            config.scheduler.total_steps = config.trainer.max_steps
        config.trainer.max_steps = budget
