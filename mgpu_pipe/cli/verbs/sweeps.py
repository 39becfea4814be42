"""``mgpu-pipe sweeps``: lists, shows, resumes, extends and cancels sweeps."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.cli.verbs.report import PORT
from mgpu_pipe.config.arguments import VerbParser, count, parse, positive_int
from mgpu_pipe.config.schema import RunOptions
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, print_error, print_line, print_text
from mgpu_pipe.import_path import allow_own_classes
from mgpu_pipe.launch.slurm.script import ask, job_of
from mgpu_pipe.report import numbers
from mgpu_pipe.report.columns import print_columns, print_rows
from mgpu_pipe.runs.latest import ROOT_KEY, split_root
from mgpu_pipe.sweep.best import Trial, pareto, rank_trials, repeat_line
from mgpu_pipe.sweep.point import CANCELLED, ENDED_BADLY, FINISHED, RESUMABLE, RUNNING, WAITING, Point, local_pid
from mgpu_pipe.sweep.store import Store, find, stores
from mgpu_pipe.system.local_files import expand_home

ACTIONS = {
    "list": "the sweeps below run.root=<folder>, the newest first",
    "show": "its points, and how each ended",
    "resume": "run what is missing or interrupted, each from its checkpoint",
    "extend": "add points: values, combined with other keys'; or sweep.seeds=N",
    "cancel": "stop it; nothing of it is run again until sweeps retry",
    "retry": "run again what ended badly or was cancelled (or these NUMBERs)",
    "best": "the best point, and the command that repeats it",
    "report": "write its page, and print where",
}
ACTING = ("resume", "extend", "retry", "cancel")
"""Actions that run or end points of the store."""
MAX_REASON = 240
"""Limit of characters of a reason in a table: a path may precede the problem."""
STOP_WAIT_S = 90.0
"""Seconds that ``cancel`` waits for a running point to save."""


def sweeps(words: list[str]) -> int:
    """``mgpu-pipe sweeps ACTION [NAME] [...]``; returns the exit code.

    Raises:
        BadInputError: a wrong argument, no such sweep, or a store that cannot be read.
    """
    words, typed_root = split_root(words)
    root = expand_home(typed_root or Path(RunOptions.root))
    arguments = parse(_parser(), words)
    if arguments is None:
        return EXIT_OK
    action, name, more = arguments.action, arguments.name, list(arguments.more)
    if action == "list":
        if name is not None:
            raise BadInputError(f"mgpu-pipe sweeps list {name}: takes no name; see mgpu-pipe sweeps show {name}")
        return _list(stores(root), arguments.json)
    if name is None and action in ("show", "best", "report") and (newest := stores(root)[:1]):
        name = newest[0].name
        print_line(f"newest sweep: {name}", file=sys.stderr)
    if name is None:
        raise BadInputError(f"mgpu-pipe sweeps {action}: name a sweep; see mgpu-pipe sweeps list")
    if more and action not in ("extend", "retry"):
        raise BadInputError(
            f"mgpu-pipe sweeps {action} {name}: {more[0]} is not understood; see mgpu-pipe sweeps --help"
        )
    if arguments.watch and action != "report":
        raise BadInputError(f"--watch: only works with report, not with {action}")
    if arguments.port is not None and not arguments.watch:
        raise BadInputError(f"--port {arguments.port}: only works with report --watch")
    if arguments.json and action != "show":
        raise BadInputError(f"--json: only works with list and show, not with {action}")
    if arguments.trust and action not in ACTING:
        raise BadInputError(f"--trust: only works with {', '.join(ACTING)}, not with {action}")
    store = find(root, name)
    if action in ACTING and store.is_foreign and not arguments.trust:
        fix = f"read its command (mgpu-pipe sweeps show {name}) and add --trust"
        raise BadInputError(f"mgpu-pipe sweeps {action} {name}: the cache knows no launch of yours that made it; {fix}")
    if action == "show":
        return _show(store, arguments.json)
    if action == "report":
        return _report(store, arguments.watch, PORT if arguments.port is None else arguments.port)
    doing: dict[str, Callable[[Store, list[str]], int]] = {
        "resume": _resume,
        "extend": _extend,
        "cancel": _cancel,
        "retry": _retry,
        "best": _best,
    }
    return doing[action](store, more)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, ACTIONS))
    parser = VerbParser(
        prog="mgpu-pipe sweeps",
        description="\n".join(
            [
                f"The sweeps (-m) below {ROOT_KEY}=<folder> ({RunOptions.root}/).",
                "",
                *(f"  {action:<{width}}  {line}" for action, line in ACTIONS.items()),
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action", nargs="?", default="list", choices=list(ACTIONS), metavar="ACTION", help="default: list"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the sweep's; of show, best and report default: the newest"
    )
    parser.add_argument("more", nargs="*", metavar="NUMBER|OVERRIDE", help="points to retry; values to extend by")
    parser.add_argument("--watch", action="store_true", help="serve the page here, refreshed, until Ctrl-C (report)")
    parser.add_argument("--port", type=count, metavar="N", help=f"port of --watch; 0: a free one (default: {PORT})")
    parser.add_argument("--json", action="store_true", help="as JSON, every figure whole (list, show)")
    parser.add_argument(
        "--trust", action="store_true", help=f"act on a sweep that you did not start ({', '.join(ACTING)})"
    )
    return parser


def _list(sweep_stores: Sequence[Store], as_json: bool) -> int:
    rows, plain = [], []
    for store in sweep_stores:
        try:
            points = store.points()
        except BadInputError as error:  # the others are still listed
            print_error(error)
            continue
        counts = {status: sum(point.status == status for point in points) for status in (FINISHED, RUNNING)}
        left = sum(point.status in RESUMABLE for point in points)
        best = _rank_trials(store, points)[:1]
        entry = {
            "name": store.name,
            "points": len(points),
            **counts,
            "left": left,
            "ended_badly": sum(point.status in ENDED_BADLY for point in points),
            "metric": store.spec["metrics"][0],
            "best": best[0].mean if best else None,
            "created": store.spec["created"],
            "folder": str(store.folder),
        }
        plain.append(entry)
        age = numbers.duration(max(0.0, time.time() - float(store.spec["created"])))
        value = numbers.MISSING if not best else f"{store.spec['metrics'][0]}={numbers.figure(best[0].mean)}"
        figures = [str(entry[key]) for key in ("points", FINISHED, RUNNING, "left", "ended_badly")]
        rows.append([store.name, *figures, " ".join(age.split(" ")[:2]), value])
    if as_json:
        print_text(json.dumps(plain, indent=2))
    else:
        names = ("sweep", "runs", "finished", "running", "left", "ended badly", "age", "best")
        print_columns(names, rows, names[1:7], spare=("age", "ended badly", "running"))
        print_line(f"{len(rows)} sweep{'' if len(rows) == 1 else 's'}")
    return EXIT_OK


def _show(store: Store, as_json: bool) -> int:
    points = store.points()
    if as_json:
        print_text(
            json.dumps({"name": store.name, **store.spec, "points": [asdict(point) for point in points]}, indent=2)
        )
        return EXIT_OK
    metrics = list(store.spec["metrics"])
    ways = ["lower" if minimize else "higher" for minimize in store.spec["minimize"]]
    print_rows(
        [
            ("folder", str(store.folder)),
            ("command", repeat_line(store)),
            ("ranked by", "; ".join(f"{name}, {way} is better" for name, way in zip(metrics, ways, strict=True))),
        ],
        store.name,
    )
    names = ("run", "status", "step", *metrics, "time", "settings", "why")
    cells = [
        (
            str(point.number),
            point.status,
            f"{point.step:,}" if point.step else numbers.MISSING,
            *(numbers.figure(point.metric(metric), 5) for metric in metrics),
            numbers.duration(point.wall_s) if point.wall_s else numbers.MISSING,
            " ".join(point.overrides),
            point.reason[:MAX_REASON],
        )
        for point in points
    ]
    numeric = ("run", "step", *metrics, "time")
    print_columns(names, cells, numeric, below=names[-2:], spare=("time", "step"))
    _print_best(store, points)
    return EXIT_OK


def _run_left(store: Store, command: Sequence[str], numbers: Collection[int] = ()) -> int:
    """Run the rest of a sweep, or submit it if it is a SLURM array."""
    if store.spec.get("launcher") == "slurm":
        from mgpu_pipe.sweep.slurm_array import submit_left

        return submit_left(store, command, numbers)
    from mgpu_pipe.sweep.run_points import work

    return work(store, command, numbers)


def _resume(store: Store, more: list[str]) -> int:
    _enter_folder(store)
    if store.cancelled:
        print_line(f"note: {store.name}: was cancelled; mgpu-pipe sweeps retry brings it back", file=sys.stderr)
    return _run_left(store, ["mgpu-pipe", "sweeps", "resume", store.name])


def _retry(store: Store, more: list[str]) -> int:
    chosen = {positive_int(word) if word.isdigit() else _no_number(word) for word in more}
    points = store.points()
    again = [point for point in points if point.status in (*ENDED_BADLY, CANCELLED)]
    if chosen:
        unknown = chosen - {point.number for point in again}
        if unknown:
            number, status = max(unknown), {point.number: point.status for point in points}
            why = f"there are {len(points)} points"
            if number in status:
                why = f"it is {status[number]}; retry takes {', '.join((*ENDED_BADLY, CANCELLED))}"
            raise BadInputError(f"mgpu-pipe sweeps retry {store.name} {number}: {why}")
        again = [point for point in again if point.number in chosen]
    for point in again:
        store.change(point, status=WAITING, reason="", exit_code=0)
    _enter_folder(store)
    all_of_it = store.cancelled and not chosen
    store.amend(cancelled=False)
    those = () if all_of_it else {point.number for point in again} or {0}
    return _run_left(store, ["mgpu-pipe", "sweeps", "retry", store.name, *more], those)


def _no_number(word: str) -> int:
    raise BadInputError(f"mgpu-pipe sweeps retry: {word} is not the number of a point; see mgpu-pipe sweeps show")


def _extend(store: Store, more: list[str]) -> int:
    from mgpu_pipe.sweep.start_sweep import extend

    if not more:
        raise BadInputError(f"mgpu-pipe sweeps extend {store.name}: give values, such as optimizer.lr=1e-4,3e-4")
    _enter_folder(store)
    extend(store, more)
    store.amend(cancelled=False)
    return _run_left(store, ["mgpu-pipe", "sweeps", "extend", store.name, *more])


def _cancel(store: Store, more: list[str]) -> int:
    store.amend(cancelled=True)  # no process finds a next point any more
    if job := job_of(store.folder):
        with suppress(BadInputError):  # SLURM may have forgotten the job; a late start finds its point cancelled
            ask(["scancel", job])
    for point in store.points():
        if point.status in RESUMABLE:
            store.change(point, status=CANCELLED, exit_code=0)
    signalled: set[str] = set()
    until = time.monotonic() + STOP_WAIT_S
    while (points := store.points()) and (owners := {point.owner for point in points if point.status == RUNNING}):
        for owner in owners - signalled:
            if pid := local_pid(owner):
                with suppress(ProcessLookupError):  # the process has just ended
                    os.kill(pid, signal.SIGTERM)
        signalled |= owners
        if time.monotonic() > until:
            print_line(f"still running elsewhere: {[point.number for point in points if point.status == RUNNING]}")
            return EXIT_FAILURE
        time.sleep(0.1)
    for point in points:
        if point.status in RESUMABLE:
            store.change(point, status=CANCELLED, exit_code=0)
    cancelled = sum(point.status == CANCELLED for point in store.points())
    print_line(f"cancelled: {cancelled} of {len(points)} runs")
    return EXIT_OK


def _best(store: Store, more: list[str]) -> int:
    if not _print_best(store, store.points()):
        raise BadInputError(f"mgpu-pipe sweeps best {store.name}: no point has finished yet")
    return EXIT_OK


def _report(store: Store, watch: bool, port: int) -> int:
    from mgpu_pipe.report.watch import serve
    from mgpu_pipe.sweep.page import SweepPage, write_sweep_page

    if watch:
        serve(SweepPage(store).find, port)
    else:
        print_line(write_sweep_page(store))
    return EXIT_OK


def _print_best(store: Store, points: Sequence[Point]) -> bool:
    """Print the best trial, trials within its noise, and the command that repeats it."""
    trials = _rank_trials(store, points)
    if not trials:
        return False
    if len(store.spec["metrics"]) > 1:
        front = pareto(points, store.spec["metrics"], store.spec["minimize"])
        print_line("no other run beats these in both:")
        for point in front:
            reached = ", ".join(f"{name} {numbers.figure(point.metric(name))}" for name in store.spec["metrics"])
            print_line(f"  run {point.number}: {reached}: {' '.join(point.overrides)}")
        return bool(front)
    best, alike = trials[0], [trial for trial in trials if trial.alike]
    rows = [("best", f"run {best.first.number}: {store.spec['metrics'][0]} {best.text()}")]
    if alike:
        named = ", ".join(f"{trial.first.number} ({trial.text()})" for trial in alike[:5])
        rows.append(("no worse", f"within the noise of the seeds: {named}"))
    print_rows(rows)
    print_line(f"repeat it: {repeat_line(store, best.first)}")
    return True


def _rank_trials(store: Store, points: Sequence[Point]) -> list[Trial]:
    return rank_trials(points, store.spec["metrics"][0], store.spec["minimize"][0])


def _enter_folder(store: Store) -> None:
    """Change to the folder where the sweep was started, because its relative paths start there."""
    folder = str(store.spec["cwd"])
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadInputError(f"{folder}: the sweep belongs to this folder ({error.strerror}); restore it") from error
    allow_own_classes()


VERB = Verb("the sweeps there are: show, resume, extend or cancel them", sweeps, first_words=lambda: list(ACTIONS))
