"""``mgpu-pipe runs``: the runs there are; filters, sorts and deletes them."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mgpu_pipe.commands import Verb
from mgpu_pipe.config.arguments import VerbParser, parse, positive_int
from mgpu_pipe.config.dotted import setting
from mgpu_pipe.config.schema import RunOptions
from mgpu_pipe.config.suggest import nearest_key
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, RunFolderError, print_error
from mgpu_pipe.report import numbers
from mgpu_pipe.report.rows import print_columns
from mgpu_pipe.runs.listing import Listed, delete_run, list_runs, listed, told
from mgpu_pipe.runs.newest import ROOT_KEY, is_run_folder, split_root

DESCRIPTION = f"List the runs below {ROOT_KEY}=<folder> ({RunOptions.root}/), the newest first; delete some of them."
UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SORTS: dict[str, Callable[[Listed], Any]] = {
    "age": lambda run: -run.begun,
    "name": lambda run: (run.name, -run.begun),
    "state": lambda run: run.state,
    "step": lambda run: -run.step,
    "loss": lambda run: math.inf if math.isnan(run.loss) else run.loss,
    "speed": lambda run: math.inf if math.isnan(run.tokens_per_s) else -run.tokens_per_s,
    "strategy": lambda run: run.strategy,
    "size": lambda run: -run.nbytes,
}
STATES = ("running", "finished", "stopped", "failed", "unfinished", "diverged", "out_of_memory")
COLUMNS = ("state", "step", "loss", "tok/s", "strategy", "age", "size", "tags", "run")
Own = Mapping[str, Mapping[Path, Any]]
"""Of each key that was asked for besides, every run's value."""
NUMERIC = ("step", "loss", "tok/s", "age", "size")


def runs(words: list[str]) -> int:
    """``mgpu-pipe runs [RUN ...] [FILTERS] [--sort KEY] [--json] [--delete [--yes]]``.

    Returns:
        0; 1 where a run could not be deleted.

    Raises:
        BadInputError: a wrong argument, or a folder that is no run's.
    """
    words, root = split_root(words)
    arguments = parse(_parser(), words)
    if arguments is None:
        return EXIT_OK
    _check(arguments, root)
    found = list(map(_named, arguments.run)) or list_runs((root or Path(RunOptions.root)).expanduser())
    chosen = [run for run in found if _fits(run, arguments)]
    pairs = [one.partition("=")[::2] for one in arguments.where]
    by = [] if arguments.sort in SORTS else [arguments.sort]
    asked = _asked(chosen, [*by, *(key for key, _ in pairs)])
    own = dict(asked.values())
    for word, value in pairs if chosen else ():
        chosen = [run for run in chosen if _equal(asked[word][1].get(run.folder), value)]
    chosen.sort(key=(lambda run: _order(asked[by[0]][1].get(run.folder))) if by else SORTS[arguments.sort])
    chosen = chosen[::-1] if arguments.reverse else chosen
    chosen = chosen[: arguments.limit]
    if arguments.json:
        print(json.dumps([_plain(run, own) for run in chosen], indent=2))
    else:
        print_columns((*COLUMNS[:-1], *own, COLUMNS[-1]), [_cells(run, own) for run in chosen], NUMERIC)
        whole = "" if len(chosen) == len(found) else f" of {len(found)}"
        size = numbers.gibibytes(sum(run.nbytes for run in chosen) / 2**30)
        print(f"{len(chosen)}{whole} run{'' if len(found) == 1 else 's'}, {size}")
    return _delete(chosen, arguments.yes) if arguments.delete else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="mgpu-pipe runs", description=DESCRIPTION)
    parser.add_argument("run", nargs="*", type=Path, metavar="RUN", help="these folders alone")
    parser.add_argument("--name", metavar="PATTERN", help="of this run.name; * and ? stand for any text")
    parser.add_argument("--state", choices=STATES, help="unfinished: killed, or never begun")
    parser.add_argument("--strategy", metavar="NAME", help="of this strategy")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="with this tag; several: with all")
    parser.add_argument("--older", type=_seconds, metavar="AGE", help="begun longer ago: 30m, 12h, 7d or 2w")
    parser.add_argument("--newer", type=_seconds, metavar="AGE", help="begun since")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of this configuration, e.g. optimizer.lr=1e-3",
    )
    parser.add_argument(
        "--sort",
        default="age",
        metavar="COLUMN",
        help=f"{', '.join(SORTS)}, best or newest first; or a key such as optimizer.lr or val/loss, the least first",
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="the first N alone")
    parser.add_argument("--json", action="store_true", help="as JSON, every figure whole")
    parser.add_argument("--delete", action="store_true", help="show which would go, and with --yes delete them")
    parser.add_argument("--yes", action="store_true", help="delete")
    return parser


def _check(arguments: argparse.Namespace, root: Path | None) -> None:
    if arguments.run and root is not None:
        raise BadInputError(f"{ROOT_KEY}={root}: is where runs are looked for; leave out it or the folders")
    if arguments.yes and not arguments.delete:
        raise BadInputError("--yes: goes with --delete")
    if arguments.delete and arguments.json:
        raise BadInputError("--json: prints nothing but the runs; leave out it or --delete")
    narrow = (arguments.name, arguments.state, arguments.strategy, arguments.older, arguments.newer, arguments.limit)
    for one in arguments.where:
        if "=" not in one:
            raise BadInputError(f"--where {one}: give a key and its value, such as optimizer.lr=1e-3")
    if arguments.delete and not (
        arguments.run or arguments.tag or arguments.where or any(one is not None for one in narrow)
    ):
        raise BadInputError("--delete: say which, by folders or by --name, --state, --tag, --older and their like")


def _asked(runs: Sequence[Listed], words: Sequence[str]) -> dict[str, tuple[str, dict[Path, Any]]]:
    """For each word the key that it names, whole, and what each run that has that key says of it.

    Raises:
        BadInputError: no run has such a key, or a shortened one stands for several.
    """
    values = {run.folder: told(run.folder) for run in runs if words}
    known = {key for one in values.values() for key in one}
    found = {}
    for word in words if runs else ():
        keys = [word] if word in known else sorted(key for key in known if key.endswith(f".{word}"))
        if len(keys) > 1:
            raise BadInputError(f"{word}: several keys; say which: {', '.join(keys)}")
        if not keys:
            close = nearest_key(word, known | SORTS.keys())
            fix = f"did you mean {close}?" if close else f"use a key of theirs, or one of {', '.join(SORTS)}"
            raise BadInputError(f"{word}: no column, and no key of these runs; {fix}")
        found[word] = (keys[0], {folder: one[keys[0]] for folder, one in values.items() if keys[0] in one})
    return found


def _number(value: object) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _order(value: object) -> tuple[int, float, str]:
    """Numbers first, then texts; last the runs that lack the key."""
    number = _number(value)
    return (2, 0.0, "") if value is None else (1, 0.0, setting(value)) if math.isnan(number) else (0, number, "")


def _equal(value: object, word: str) -> bool:
    return setting(value) == word or _number(value) == _number(word)


def _shown(value: object) -> str:
    return numbers.MISSING if value is None else f"{value:.6g}" if isinstance(value, float) else setting(value)


def _named(folder: Path) -> Listed:
    if not is_run_folder(folder.expanduser()):
        raise RunFolderError(f"{folder}: not a run's folder; mgpu-pipe runs {ROOT_KEY}={folder} lists those below it")
    return listed(folder.expanduser())


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: use an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * UNITS[match[2]]


def _fits(run: Listed, asked: argparse.Namespace) -> bool:
    age = time.time() - run.begun
    return (
        (asked.name is None or fnmatchcase(run.name, asked.name))
        and asked.state in (None, run.state)
        and asked.strategy in (None, run.strategy)
        and set(asked.tag) <= set(run.tags)
        and (asked.older is None or age > asked.older)
        and (asked.newer is None or age <= asked.newer)
    )


def _plain(run: Listed, own: Own) -> dict[str, Any]:
    """As JSON has it: no NaN, paths whole; and the keys that were asked for."""
    more = {key: values.get(run.folder) for key, values in own.items()}
    every = {**asdict(run), "folder": str(run.folder.absolute()), **more}
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in every.items()}


def _cells(run: Listed, own: Own) -> tuple[str, ...]:
    cells = (
        run.state,
        f"{run.step:,}",
        numbers.fixed(run.loss, 4),
        numbers.MISSING if math.isnan(run.tokens_per_s) else numbers.count(run.tokens_per_s),
        run.strategy,
        _age(run),
        numbers.gibibytes(run.nbytes / 2**30),
        ",".join(run.tags),
        *(_shown(values.get(run.folder)) for values in own.values()),
        str(run.folder),
    )
    return cells


def _age(run: Listed) -> str:
    """Since it was begun, in the largest unit: ``5 d``."""
    age = numbers.duration(max(0.0, time.time() - run.begun))
    return " ".join(age.split(" ")[:2]) if run.begun else numbers.MISSING


def _delete(chosen: Sequence[Listed], really: bool) -> int:
    if not really:
        print("nothing was deleted yet; add --yes" if chosen else "nothing to delete")
        return EXIT_OK
    code, gone = EXIT_OK, 0
    for run in chosen:
        try:
            delete_run(run.folder)
            gone += 1
        except RunFolderError as error:
            print_error(error)
            code = EXIT_FAILURE
    print(f"deleted: {gone} run{'' if gone == 1 else 's'}")
    return code


VERB = Verb("the runs there are: list, filter, sort and delete them", runs)
