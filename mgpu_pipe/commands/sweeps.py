"""``mgpu-pipe sweeps``: the sweeps there are; shows, continues, extends and stops them."""

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

from mgpu_pipe.commands import Verb
from mgpu_pipe.commands.report import PORT
from mgpu_pipe.config.arguments import VerbParser, count, parse, positive_int
from mgpu_pipe.config.schema import RunOptions
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, print_error
from mgpu_pipe.launch.slurm_submitted import ask, job_of
from mgpu_pipe.report import numbers
from mgpu_pipe.report.rows import print_columns, print_rows
from mgpu_pipe.runs.lock import boot_id
from mgpu_pipe.runs.newest import ROOT_KEY, split_root
from mgpu_pipe.sweep.best import Trial, pareto, ranked, repeat_line
from mgpu_pipe.sweep.point import CANCELLED, ENDED_BADLY, FINISHED, GOES_ON, RUNNING, WAITING, Point
from mgpu_pipe.sweep.store import Store, find, stores

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
LONGEST_REASON = 240
"""Characters of a reason in a table: a path may come before what went wrong there."""
STOP_WAIT_S = 90.0
"""How long ``cancel`` waits for a running point to save."""


def sweeps(words: list[str]) -> int:
    """``mgpu-pipe sweeps ACTION [NAME] [...]``; returns the exit code.

    Raises:
        BadInputError: a wrong argument, no such sweep, or a store that cannot be read.
    """
    words, given = split_root(words)
    root = (given or Path(RunOptions.root)).expanduser()
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
        print(f"newest sweep: {name}", file=sys.stderr)
    if name is None:
        raise BadInputError(f"mgpu-pipe sweeps {action}: name a sweep; see mgpu-pipe sweeps list")
    if more and action not in ("extend", "retry"):
        raise BadInputError(f"mgpu-pipe sweeps {action} {name}: {more[0]} is not understood")
    if arguments.watch and action != "report":
        raise BadInputError(f"--watch: goes with report, not with {action}")
    if arguments.port is not None and not arguments.watch:
        raise BadInputError(f"--port {arguments.port}: is for report --watch; add it, or leave the port out")
    if arguments.json and action != "show":
        raise BadInputError(f"--json: goes with list and show, not with {action}")
    store = find(root, name)
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
    return parser


def _list(found: Sequence[Store], as_json: bool) -> int:
    rows, plain = [], []
    for store in found:
        try:
            points = store.points()
        except BadInputError as error:  # the others are listed all the same
            print_error(error)
            continue
        counted = {status: sum(point.status == status for point in points) for status in (FINISHED, RUNNING)}
        left = sum(point.status in GOES_ON for point in points)
        best = _ranked(store, points)[:1]
        entry = {
            "name": store.name,
            "points": len(points),
            **counted,
            "left": left,
            "ended_badly": sum(point.status in ENDED_BADLY for point in points),
            "metric": store.asked["metrics"][0],
            "best": best[0].mean if best else None,
            "created": store.asked["created"],
            "folder": str(store.folder),
        }
        plain.append(entry)
        age = numbers.duration(max(0.0, time.time() - float(store.asked["created"])))
        value = numbers.MISSING if not best else f"{store.asked['metrics'][0]}={numbers.figure(best[0].mean)}"
        figures = [str(entry[key]) for key in ("points", FINISHED, RUNNING, "left", "ended_badly")]
        rows.append([store.name, *figures, " ".join(age.split(" ")[:2]), value])
    if as_json:
        print(json.dumps(plain, indent=2))
    else:
        names = ("sweep", "runs", "finished", "running", "left", "ended badly", "age", "best")
        print_columns(names, rows, names[1:7])
        print(f"{len(rows)} sweep{'' if len(rows) == 1 else 's'}")
    return EXIT_OK


def _show(store: Store, as_json: bool) -> int:
    points = store.points()
    if as_json:
        print(json.dumps({"name": store.name, **store.asked, "points": [asdict(point) for point in points]}, indent=2))
        return EXIT_OK
    metrics = list(store.asked["metrics"])
    ways = ["lower" if one else "higher" for one in store.asked["minimize"]]
    print_rows(
        [
            ("folder", str(store.folder)),
            ("command", repeat_line(store)),
            ("ranked by", "; ".join(f"{one}, {way} is better" for one, way in zip(metrics, ways, strict=True))),
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
            point.reason[:LONGEST_REASON],
        )
        for point in points
    ]
    print_columns(names, cells, ("run", "step", *metrics, "time"))
    _say_best(store, points)
    return EXIT_OK


def _run_left(store: Store, command: Sequence[str], numbers: Collection[int] = ()) -> int:
    """Run what is left of a sweep, or submit it where it is an array of SLURM's."""
    if store.asked.get("launcher") == "slurm":
        from mgpu_pipe.sweep.slurm_array import submit_left

        return submit_left(store, command, numbers)
    from mgpu_pipe.sweep.work import work

    return work(store, command, numbers)


def _resume(store: Store, more: list[str]) -> int:
    _back_to(store)
    if store.cancelled:
        print(f"note: {store.name}: was cancelled; mgpu-pipe sweeps retry brings it back", file=sys.stderr)
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
                why = f"it is {status[number]}; retry is for {', '.join((*ENDED_BADLY, CANCELLED))}"
            raise BadInputError(f"mgpu-pipe sweeps retry {store.name} {number}: {why}")
        again = [point for point in again if point.number in chosen]
    for point in again:
        store.change(point, status=WAITING, reason="", exit_code=0)
    _back_to(store)
    all_of_it = store.cancelled and not chosen
    store.amend(cancelled=False)
    those = () if all_of_it else {point.number for point in again} or {0}
    return _run_left(store, ["mgpu-pipe", "sweeps", "retry", store.name, *more], those)


def _no_number(word: str) -> int:
    raise BadInputError(f"mgpu-pipe sweeps retry: {word} is no point's number; see mgpu-pipe sweeps show")


def _extend(store: Store, more: list[str]) -> int:
    from mgpu_pipe.sweep.extend import extend

    if not more:
        raise BadInputError(f"mgpu-pipe sweeps extend {store.name}: give values, such as optimizer.lr=1e-4,3e-4")
    _back_to(store)
    extend(store, more)
    store.amend(cancelled=False)
    return _run_left(store, ["mgpu-pipe", "sweeps", "extend", store.name, *more])


def _cancel(store: Store, more: list[str]) -> int:
    store.amend(cancelled=True)  # a process that searches for its next point finds none
    if job := job_of(store.folder):
        with suppress(BadInputError):  # SLURM has forgotten it; a job that starts later finds its point cancelled
            ask(["scancel", job])
    for point in store.points():
        if point.status in GOES_ON:
            store.change(point, status=CANCELLED, exit_code=0)
    asked: set[str] = set()
    until = time.monotonic() + STOP_WAIT_S
    while (points := store.points()) and (owners := {point.owner for point in points if point.status == RUNNING}):
        for owner in owners - asked:
            boot, pid, _ = owner.split(":", 2)
            if boot == boot_id():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(int(pid), signal.SIGTERM)
        asked |= owners
        if time.monotonic() > until:
            print(f"still running elsewhere: {[point.number for point in points if point.status == RUNNING]}")
            return EXIT_FAILURE
        time.sleep(0.1)
    for point in points:
        if point.status in GOES_ON:
            store.change(point, status=CANCELLED, exit_code=0)
    counted = sum(point.status == CANCELLED for point in store.points())
    print(f"cancelled: {counted} of {len(points)} runs")
    return EXIT_OK


def _best(store: Store, more: list[str]) -> int:
    if not _say_best(store, store.points()):
        raise BadInputError(f"mgpu-pipe sweeps best {store.name}: no point has finished yet")
    return EXIT_OK


def _report(store: Store, watch: bool, port: int) -> int:
    from mgpu_pipe.report.watch import serve
    from mgpu_pipe.sweep.page import SweepPage, write_sweep_page

    if watch:
        serve(SweepPage(store).find, port)
    else:
        print(write_sweep_page(store))
    return EXIT_OK


def _say_best(store: Store, points: Sequence[Point]) -> bool:
    """Print the best trial, those that the noise does not tell from it, and the command that repeats it."""
    trials = _ranked(store, points)
    if not trials:
        return False
    if len(store.asked["metrics"]) > 1:
        front = pareto(points, store.asked["metrics"], store.asked["minimize"])
        print("no other run beats these in both:")
        for point in front:
            reached = ", ".join(f"{name} {numbers.figure(point.metric(name))}" for name in store.asked["metrics"])
            print(f"  run {point.number}: {reached}: {' '.join(point.overrides)}")
        return bool(front)
    best, alike = trials[0], [trial for trial in trials if trial.alike]
    rows = [("best", f"run {best.first.number}: {store.asked['metrics'][0]} {best.told()}")]
    if alike:
        named = ", ".join(f"{trial.first.number} ({trial.told()})" for trial in alike[:5])
        rows.append(("no worse", f"within the noise of the seeds: {named}"))
    print_rows(rows)
    print(f"repeat it: {repeat_line(store, best.first)}")
    return True


def _ranked(store: Store, points: Sequence[Point]) -> list[Trial]:
    return ranked(points, store.asked["metrics"][0], store.asked["minimize"][0])


def _back_to(store: Store) -> None:
    """Go where the sweep was begun: what it names by relative paths lies there."""
    folder = str(store.asked["cwd"])
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadInputError(
            f"{folder}: the sweep was begun in this folder ({error.strerror}); bring it back"
        ) from error


VERB = Verb("the sweeps there are: show, resume, extend or cancel them", sweeps, first_words=lambda: list(ACTIONS))
