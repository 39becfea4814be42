"""Worker loop of a sweep: a process takes a free point, runs it and takes the next."""

from __future__ import annotations

import csv
import itertools
import math
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from mgpu_pipe.config.group_keys import SchedulerConfig
from mgpu_pipe.config.hydra import command_line as hydra_cli
from mgpu_pipe.config.hydra.command_line import SweepRequest
from mgpu_pipe.config.hydra.compose import Composition
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, ConfigError, MgpuError, print_line, print_traceback
from mgpu_pipe.launch import fork_server
from mgpu_pipe.launch.compositions import WORST_LAST, check_composition, launch_composition
from mgpu_pipe.launch.signals import run_begins, run_ended, stop_requested
from mgpu_pipe.runs.resume_command import this_program
from mgpu_pipe.sweep.point import FAILED, FINISHED, PAUSED, PRUNED, RESUMABLE, RUNNING, Point, local_pid, worker_id
from mgpu_pipe.sweep.search import Tried, promoted_trials, suggest
from mgpu_pipe.sweep.space import as_override, from_record
from mgpu_pipe.sweep.store import Store
from mgpu_pipe.sweep.sweep_outcome import ended_with, killed_for_memory, record_outcome, refuse_point, say_in_run
from mgpu_pipe.system.local_files import expand_home

POLL_S = 0.2
MOST_POINTS = 100_000
"""Most runs of a grid, whose list is made before the first run."""
TABLE_ROWS = 50
"""Limit of runs in the table at a sweep's end."""


def work(store: Store, command: Sequence[str], numbers: Collection[int] = ()) -> int:
    """Run the waiting and interrupted points until none is left or a signal stops it.

    Args:
        command: the user's command line, for the runs' records.
        numbers: points to run; empty: all.

    Returns:
        The worst exit code of the sweep's points; 75 if some are left to run.
    """
    from mgpu_pipe.sweep import parallel

    if parallel.is_worker():
        numbers = parallel.chosen_points()
    elif store.spec["parallel"] > 1:
        parallel.work_together(store, numbers)
        return conclude(store)
    with fork_server.keep_server():
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
        tried.add(point.number)  # a point whose worker is killed again and again does not block the others
        total = max(len(store.points()), store.spec["trials"] if store.spec["search"] != "grid" else 0)
        until = f" to step {point.budget}" if store.spec["rungs"] else ""
        print_line(f"run {point.number} of {total}{until}: {shlex.join(point.overrides)}", file=sys.stderr, flush=True)
        if _run(store, point, command) == EXIT_STOPPED:
            break


def conclude(store: Store) -> int:
    """Print a sweep's table, report and resume command; returns the exit code."""
    from mgpu_pipe.launch.outcome import show_sweep
    from mgpu_pipe.sweep.page import write_sweep_page

    points = _prune_paused(store)
    left = [point for point in points if point.status in RESUMABLE]
    running = [point for point in points if point.status == RUNNING]
    if left:
        print_line(f"{len(left)} of {len(points)} runs are left, because the sweep was stopped", file=sys.stderr)
    for point in running:
        where = f"process {pid}" if (pid := local_pid(point.owner)) else "another container or host"
        print_line(f"run {point.number} is under way in {where}", file=sys.stderr)
    folders = [RunPaths(Path(point.folder)) for point in points if point.folder]
    if folders:
        show_sweep(folders[:TABLE_ROWS], lambda: write_sweep_page(store), resume_line(store) if left else "")
    print_line(f"sweep: {store.folder}", flush=True)
    codes = [point.exit_code for point in points if point.status not in RESUMABLE]
    return max([*codes, EXIT_STOPPED if left else EXIT_OK], key=WORST_LAST.index)


def _prune_paused(store: Store) -> list[Point]:
    """The points of the sweep; marks paused points as pruned once no point can promote them."""
    points = store.points()
    grid = store.spec["search"] == "grid"
    open_ones = any(point.status in (RUNNING, *RESUMABLE) for point in points)
    if open_ones or stop_requested() or not (grid or len({point.trial for point in points}) >= store.spec["trials"]):
        return points
    for point in points:
        if point.status == PAUSED and store.change(point, status=PRUNED):
            say_in_run(RunPaths(Path(point.folder)), status=PRUNED)
    return store.points()


def resume_line(store: Store, verb: str = "resume") -> str:
    """The command that resumes a sweep."""
    return shlex.join([*this_program(), "sweeps", verb, store.name, f"run.root={store.folder.parents[1]}"])


def parsed_again(flags: Sequence[str], overrides: Sequence[str]) -> Namespace:
    """Parsed Hydra command line of these flags and overrides."""
    return hydra_cli.parse([*flags, *overrides])


def take_next(store: Store, tried: Collection[int], numbers: Collection[int]) -> Point | None:
    """Claim the next point for this process: a resumable one, one that a rung promotes, or a new one.

    Args:
        tried: numbers of the points that this process has run.
        numbers: points to run; empty: all.
    """
    while not store.cancelled:
        points = store.points()
        first = next(iter(store.spec["rungs"]), 0)
        for point in points:
            wanted = (
                point.status in RESUMABLE and point.number not in tried and (not numbers or point.number in numbers)
            )
            if wanted and (taken := take(store, point, budget=point.budget or first)) is not None:
                return taken
        if numbers:
            return None
        for point, budget in _promote(store, points):
            if (taken := take(store, point, budget=budget)) is not None:
                return taken
        if store.spec["search"] == "grid" or len({point.trial for point in points}) >= store.spec["trials"]:
            last = _best_paused(store, points)
            return None if last is None else take(store, last[0], budget=last[1])
        chosen = suggest(
            store.spec["search"],
            from_record(store.spec["space"]),
            so_far(store, points),
            store.spec["minimize"],
            store.spec["seed"],
        )
        runs = with_seeds([f"{key}={value}" for key, value in chosen.items()], store.spec["seed"], store.spec["seeds"])
        store.add([runs], after=points[-1].number if points else 0)
    return None


def with_seeds(overrides: Sequence[str], seed: int, seeds: int) -> list[list[str]]:
    """Overrides of a trial's runs, one for each seed."""
    return [[*overrides, f"seed={seed + offset}"] for offset in range(seeds)] if seeds > 1 else [list(overrides)]


def so_far(store: Store, points: Sequence[Point]) -> list[Tried]:
    """Trials for the search; values are means over seeds."""
    by_trial: dict[int, list[Point]] = {}
    for point in points:
        by_trial.setdefault(point.trial, []).append(point)
    keys = {record["key"] for record in store.spec["space"]}
    tried = []
    for runs in by_trial.values():
        chosen = {key: value for key, value in runs[0].settings.items() if key in keys}
        columns = [[run.metric(metric) for run in runs] for metric in store.spec["metrics"]]
        whole = all(run.status == FINISHED for run in runs) and not any(map(math.isnan, itertools.chain(*columns)))
        values = [math.fsum(column) / len(column) for column in columns] if whole else []
        ended = not any(run.status in (RUNNING, *RESUMABLE) for run in runs)
        tried.append(Tried(chosen, values, ended, runs[0].rungs))
    return tried


def _promote(store: Store, points: Sequence[Point]) -> Iterator[tuple[Point, int]]:
    rungs = store.spec["rungs"]
    if not rungs:
        return
    reached = {point.number: point.rungs for point in points if point.rungs}
    by_number = {point.number: point for point in points}
    for number in promoted_trials(reached, rungs, store.spec["minimize"][0], store.spec["pruner"]):
        point = by_number[number]
        if point.status in (PAUSED, PRUNED):
            yield point, next(rung for rung in rungs if rung > max(point.rungs))


def _best_paused(store: Store, points: Sequence[Point]) -> tuple[Point, int] | None:
    """The best paused run at the last rung and its next rung, if no run was trained whole; else None."""
    rungs, paused = store.spec["rungs"], [point for point in points if point.status in (PAUSED, PRUNED)]
    if not paused or any(point.status in (RUNNING, FINISHED, *RESUMABLE) for point in points):
        return None
    sign = 1.0 if store.spec["minimize"][0] else -1.0
    best = min(paused, key=lambda point: (-max(point.rungs), sign * point.rungs[max(point.rungs)], point.number))
    return best, next(rung for rung in rungs if rung > max(best.rungs))


def _awaits_others(store: Store, numbers: Collection[int]) -> bool:
    """Whether runs of other processes may still promote a point."""
    pruning = bool(store.spec["rungs"]) and not numbers
    return pruning and any(point.status == RUNNING for point in store.points())


def take(store: Store, point: Point, budget: int = 0) -> Point | None:
    """Claim a point for this process; None if another process was faster."""
    attempts, now = point.attempts + 1, time.time()
    return store.change(
        point, status=RUNNING, owner=worker_id(), attempts=attempts, begun=now, reason="", budget=budget
    )


def _run(store: Store, point: Point, command: Sequence[str]) -> int:
    """Run a point that this process claimed."""
    parsed = parsed_again(store.spec["flags"], [*store.spec["fixed"], *point.overrides])
    try:
        composition = hydra_cli.compose_one(parsed)
    except MgpuError as error:
        return refuse_point(store, point, error)
    composition.swept = list(point.overrides)
    return run_composed(store, point, composition, command)


def run_composed(store: Store, point: Point, composition: Composition, command: Sequence[str]) -> int:
    """Run a point, in its folder if it has one, and record the outcome; returns the exit code."""
    if point.status != RUNNING:
        point = take(store, point) or point
    run_begins()
    if point.folder:
        composition.config.run.dir, composition.config.checkpoint.resume = point.folder, "auto"
    _limit(composition.config.scheduler, composition.config.trainer, point.budget)
    began, memory = time.monotonic(), killed_for_memory()

    def remember_folder(folder: Path) -> None:
        nonlocal point
        point = store.change(point, folder=str(folder)) or point

    try:
        check_composition(composition, joins=True)
        result = launch_composition(composition, command, remember_folder)
    except MgpuError as error:
        return refuse_point(store, point, error)
    except Exception as error:  # a bug: print the traceback and continue with the other runs
        print_traceback()
        return ended_with(store, point, FAILED, EXIT_FAILURE, repr(error), {}, time.monotonic() - began)
    run_ended(asked_to_stop=result.asked_to_stop)
    if point.folder != str(result.folder):
        remember_folder(result.folder)
    return record_outcome(store, point, result.exit_code, time.monotonic() - began, killed_for_memory() > memory)


def _limit(scheduler: SchedulerConfig, trainer: TrainerConfig, budget: int) -> None:
    """Let a run train to a rung; its schedule keeps the whole length."""
    if budget:
        if scheduler.total_steps is None:
            scheduler.total_steps = trainer.max_steps
        trainer.max_steps = budget


def grid(request: SweepRequest) -> list[list[list[str]]]:
    """Trials of all combinations of values and ``sweep.points``; ConfigError for a range, or over
    :data:`MOST_POINTS`."""
    listed: list[list[list[str]]] = []
    for key, values in request.values.items():
        if not isinstance(values, list):
            text = str(values.input_line).partition("=")[2]
            raise ConfigError(key, text, "list its values, a,b,c or range(1,9,2)", "a range is not a list of values")
        if not values:
            raise ConfigError(key, "", "list at least one, a,b,c or range(1,9,2)", "it has no values")
        listed.append([[value] for value in values])
    if request.config.sweep.points is not None:
        path = request.config.sweep.points
        listed.insert(0, read_points(expand_home(path)))
        if both := [word for word in listed[0][0] if word.partition("=")[0] in request.values]:
            key = both[0].partition("=")[0]
            raise ConfigError(key, "...", f"sweep it here or in {path}", "the points have values of it already")
    if (number := math.prod(map(len, listed)) * request.config.sweep.seeds) > MOST_POINTS:
        fix = f"use at most {MOST_POINTS:,}, or a search: sweep=random"
        raise ConfigError("sweep", "grid", fix, f"these values make {number:,} runs")
    settings = ([word for part in point for word in part] for point in itertools.product(*listed))
    return [with_seeds(point, request.config.seed, request.config.sweep.seeds) for point in settings]


def read_points(path: Path) -> list[list[str]]:
    """Overrides of every row of a csv file of points; ConfigError if it has no row, or a wrong one."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            lines = csv.reader(file)
            (_, header), *rows = [(lines.line_num, row) for row in lines if row]
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise ConfigError("sweep.points", path, "give a csv file whose first row names keys", str(error)) from error
    header = [key.strip() for key in header]
    if twice := [key for column, key in enumerate(header) if key in header[:column]]:
        raise ConfigError("sweep.points", path, "give it one column", f"{twice[0]} is the header of two columns")
    if not rows:
        raise ConfigError("sweep.points", path, "add a row for each point", "it has no point")
    for number, row in rows:
        if len(row) != len(header):
            reason = f"line {number} has {len(row)} values for {len(header)} keys"
            raise ConfigError("sweep.points", path, "quote a value that has commas", reason)
    pairs = (zip(header, row, strict=True) for _, row in rows)
    return [[f"{key}={as_override(key, cell.strip())}" for key, cell in point] for point in pairs]
