"""``mgpu-pipe runs``: lists, filters, sorts and deletes runs."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser, parse, positive_int
from mgpu_pipe.config.convert import all_keys, key_kind, setting
from mgpu_pipe.config.schema import RunOptions
from mgpu_pipe.config.suggest import nearest_key
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, BadInputError, RunFolderError, print_error, print_line, print_text
from mgpu_pipe.report import numbers
from mgpu_pipe.report.columns import print_columns
from mgpu_pipe.runs.latest import ROOT_KEY, is_run_folder, split_root
from mgpu_pipe.runs.listing import Listed, config_and_metrics, delete_run, list_run, list_runs
from mgpu_pipe.system.local_files import expand_home, is_folder

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
ExtraColumns = Mapping[str, Mapping[Path, Any]]
"""Values of further keys, by key and run folder."""
NUMERIC = ("step", "loss", "tok/s", "age", "size")


def runs(words: list[str]) -> int:
    """``mgpu-pipe runs [RUN ...] [FILTERS] [--sort KEY] [--json] [--delete [--yes]]``.

    Returns:
        0; 1 if a run could not be deleted.

    Raises:
        BadInputError: a wrong argument, or a folder that is not a run's.
    """
    words, root = split_root(words)
    arguments = parse(_parser(), words)
    if arguments is None:
        return EXIT_OK
    _check(arguments, root)
    candidates = list(map(_find_named, arguments.run)) or list_runs(expand_home(root or Path(RunOptions.root)))
    chosen = [run for run in candidates if _fits(run, arguments)]
    pairs = [condition.partition("=")[::2] for condition in arguments.where]
    sort_keys = [] if arguments.sort in SORTS else [arguments.sort]
    columns = _extra_columns(chosen, [*sort_keys, *(key for key, _ in pairs)])
    extra = dict(columns.values())
    for word, value in pairs if chosen else ():
        chosen = [run for run in chosen if _equal(columns[word][1].get(run.folder), value)]
    chosen.sort(
        key=(lambda run: _order(columns[sort_keys[0]][1].get(run.folder))) if sort_keys else SORTS[arguments.sort]
    )
    chosen = chosen[::-1] if arguments.reverse else chosen
    chosen = chosen[: arguments.limit]
    if arguments.json:
        print_text(json.dumps([_plain(run, extra) for run in chosen], indent=2))
    else:
        names = (*COLUMNS[:-1], *extra, COLUMNS[-1])
        print_columns(names, [_cells(run, extra) for run in chosen], NUMERIC, spare=("tags", "size", "age", "tok/s"))
        whole = "" if len(chosen) == len(candidates) else f" of {len(candidates)}"
        size = numbers.gibibytes(sum(run.nbytes for run in chosen) / 2**30)
        print_line(f"{len(chosen)}{whole} run{'' if len(candidates) == 1 else 's'}, {size}")
    return _delete(chosen, arguments.yes) if arguments.delete else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="mgpu-pipe runs", description=DESCRIPTION)
    parser.add_argument("run", nargs="*", type=Path, metavar="RUN", help="these folders alone")
    parser.add_argument("--name", metavar="PATTERN", help="of this run.name; * and ? stand for any text")
    parser.add_argument("--state", choices=STATES, help="unfinished: killed, or never started")
    parser.add_argument("--strategy", metavar="NAME", help="of this strategy")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="with this tag; several: with all")
    parser.add_argument("--older", type=_seconds, metavar="AGE", help="started longer ago: 30m, 12h, 7d or 2w")
    parser.add_argument("--newer", type=_seconds, metavar="AGE", help="started since")
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


def _is_key(word: str) -> bool:
    """Whether ``word`` is a configuration key, with or without its section."""
    return key_kind(word) != "unknown" or any(key.endswith(f".{word}") for key in all_keys())


def _no_column(word: str, keys: Iterable[str]) -> BadInputError:
    close = nearest_key(word, {*keys, *SORTS})
    fix = f"did you mean {close}?" if close else f"use a key of theirs, or one of {', '.join(SORTS)}"
    return BadInputError(f"{word}: no column, and no key of these runs; {fix}")


def _check(arguments: argparse.Namespace, root: Path | None) -> None:
    if arguments.run and root is not None:
        raise BadInputError(f"{ROOT_KEY}={root}: is where runs are looked for; leave it out, or the folders")
    if root is not None and not is_folder(expand_home(root)):
        raise BadInputError(f"{ROOT_KEY}={root}: no such folder; give the folder of runs")
    if arguments.sort not in SORTS and "/" not in arguments.sort and not _is_key(arguments.sort):
        raise _no_column(arguments.sort, all_keys())
    if arguments.yes and not arguments.delete:
        raise BadInputError("--yes: only works with --delete")
    if arguments.delete and arguments.json:
        raise BadInputError("--json: prints nothing but the runs; leave out one of them")
    narrow = (arguments.name, arguments.state, arguments.strategy, arguments.older, arguments.newer, arguments.limit)
    for condition in arguments.where:
        if "=" not in condition:
            raise BadInputError(f"--where {condition}: give a key and its value, such as optimizer.lr=1e-3")
        key = condition.partition("=")[0]
        if not _is_key(key):
            raise _no_column(key, all_keys())
    if arguments.delete and not (
        arguments.run or arguments.tag or arguments.where or any(condition is not None for condition in narrow)
    ):
        raise BadInputError("--delete: name the runs, by folders or by --name, --state, --tag, --older and their like")


def _extra_columns(runs: Sequence[Listed], words: Sequence[str]) -> dict[str, tuple[str, dict[Path, Any]]]:
    """Full key of each word and its value in each run; BadInputError for an unknown or ambiguous word."""
    values = {run.folder: config_and_metrics(run.folder) for run in runs if words}
    known = {key for row in values.values() for key in row}
    columns = {}
    for word in words if runs else ():
        keys = [word] if word in known else sorted(key for key in known if key.endswith(f".{word}"))
        if len(keys) > 1:
            raise BadInputError(f"{word}: several keys end so; give one of {', '.join(keys)}")
        if not keys:
            raise _no_column(word, known)
        columns[word] = (keys[0], {folder: row[keys[0]] for folder, row in values.items() if keys[0] in row})
    return columns


def _number(value: object) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _order(value: object) -> tuple[int, float, str]:
    """Sort key: numbers first, then texts, then missing values."""
    number = _number(value)
    return (2, 0.0, "") if value is None else (1, 0.0, setting(value)) if math.isnan(number) else (0, number, "")


def _equal(value: object, word: str) -> bool:
    return setting(value) == word or _number(value) == _number(word)


def _cell_text(value: object) -> str:
    return numbers.MISSING if value is None else f"{value:.6g}" if isinstance(value, float) else setting(value)


def _find_named(folder: Path) -> Listed:
    if not is_run_folder(expand_home(folder)):
        raise RunFolderError(f"{folder}: not a run's folder; mgpu-pipe runs {ROOT_KEY}={folder} lists those below it")
    return list_run(expand_home(folder))


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: use an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * UNITS[match[2]]


def _fits(run: Listed, arguments: argparse.Namespace) -> bool:
    age = time.time() - run.begun
    return (
        (arguments.name is None or fnmatchcase(run.name, arguments.name))
        and arguments.state in (None, run.state)
        and arguments.strategy in (None, run.strategy)
        and set(arguments.tag) <= set(run.tags)
        and (arguments.older is None or age > arguments.older)
        and (arguments.newer is None or age <= arguments.newer)
    )


def _plain(run: Listed, extra: ExtraColumns) -> dict[str, Any]:
    """A run for JSON: None for NaN, absolute paths, and the extra columns."""
    more = {key: values.get(run.folder) for key, values in extra.items()}
    every = {**asdict(run), "folder": str(run.folder.absolute()), **more}
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in every.items()}


def _cells(run: Listed, extra: ExtraColumns) -> tuple[str, ...]:
    cells = (
        run.state,
        f"{run.step:,}",
        numbers.fix_decimals(run.loss, 4),
        numbers.MISSING if math.isnan(run.tokens_per_s) else numbers.count(run.tokens_per_s),
        run.strategy,
        _age(run),
        numbers.gibibytes(run.nbytes / 2**30),
        ",".join(run.tags),
        *(_cell_text(values.get(run.folder)) for values in extra.values()),
        str(run.folder),
    )
    return cells


def _age(run: Listed) -> str:
    """Time since the start in the largest unit: ``5 d``."""
    age = numbers.duration(max(0.0, time.time() - run.begun))
    return " ".join(age.split(" ")[:2]) if run.begun else numbers.MISSING


def _delete(chosen: Sequence[Listed], really: bool) -> int:
    if not really:
        print_line("nothing was deleted yet; add --yes" if chosen else "nothing to delete")
        return EXIT_OK
    code, gone = EXIT_OK, 0
    for run in chosen:
        try:
            delete_run(run.folder)
            gone += 1
        except RunFolderError as error:
            print_error(error)
            code = EXIT_FAILURE
    print_line(f"deleted: {gone} run{'' if gone == 1 else 's'}")
    return code


VERB = Verb("the runs there are: list, filter, sort and delete them", runs)
