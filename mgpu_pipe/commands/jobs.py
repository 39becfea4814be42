"""``mgpu-pipe jobs``: this user's runs under SLURM, by one call of squeue; follows, cancels and requeues them."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mgpu_pipe.commands import Verb
from mgpu_pipe.config.arguments import VerbParser, parse
from mgpu_pipe.errors import EXIT_OK, BadInputError, RunFolderError
from mgpu_pipe.launch.slurm_submitted import POINTS, ask, job_of, log_of, seconds
from mgpu_pipe.report import numbers
from mgpu_pipe.report.rows import print_columns
from mgpu_pipe.runs.listing import Listed, listed
from mgpu_pipe.runs.newest import is_run_folder

DESCRIPTION = (
    "List this user's runs that SLURM has queued or runs; or follow the output of one, cancel it,\n"
    "or have it saved and queued again. RUN is a run's or a sweep's folder, or a job's number."
)
ASKED = "%i|%T|%L|%K|%R|%k"
"""Job, state, time left, place in the array, nodes or reason; last the comment, the folder, which may have any sign."""
ACTIONS = ("list", "follow", "cancel", "requeue")
COLUMNS = ("job", "state", "nodes or reason", "step", "loss", "tok/s", "limit in", "end in", "run")
NUMERIC = ("step", "loss", "tok/s", "limit in", "end in")


@dataclass(frozen=True)
class Job:
    """A job of a run; times are in seconds, NaN where they are not known.

    Attributes:
        job: its number; of an array ``<array>_<place>``.
        state: SLURM's word.
        where: its nodes, or in brackets why it waits.
        limit_s: until the job's time limit.
        end_s: until the run's last step, at the speed of the one taken last.
        log: what its tasks print.
    """

    job: str
    state: str
    where: str
    limit_s: float
    end_s: float
    run: Listed
    log: Path


def jobs(words: list[str]) -> int:
    """``mgpu-pipe jobs [--all] [--json]``, ``mgpu-pipe jobs follow|cancel|requeue RUN``.

    Raises:
        BadInputError: a wrong argument, no SLURM here, or SLURM refuses.
    """
    parser = VerbParser(
        prog="mgpu-pipe jobs", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=ACTIONS, default="list")
    parser.add_argument("run", nargs="*", metavar="RUN", help="folder of a run or a sweep, or number of a job")
    parser.add_argument("--all", action="store_true", help="also those that ended a while ago, as long as SLURM knows")
    parser.add_argument("--json", action="store_true", help="as JSON, every figure whole")
    arguments = parse(parser, words)
    if arguments is None:
        return EXIT_OK
    if arguments.what == "list":
        if arguments.run:
            raise BadInputError(
                f"mgpu-pipe jobs list: {arguments.run[0]}: lists all; follow, cancel and requeue take a run"
            )
        return _list(queued(ended=arguments.all), as_json=arguments.json)
    if not arguments.run:
        raise BadInputError(f"mgpu-pipe jobs {arguments.what}: say which run; see mgpu-pipe jobs")
    if arguments.what == "follow":
        return _follow(arguments.run)
    for name in arguments.run:
        job, _ = _job(name)
        ask(["scancel", job] if arguments.what == "cancel" else ["scontrol", "requeue", job])
        print(f"{'cancelled' if arguments.what == 'cancel' else 'queued again'}: {job}")
    return EXIT_OK


def queued(*, ended: bool = False) -> list[Job]:
    """This user's jobs that run what this program submitted, in SLURM's order.

    Args:
        ended: also jobs that ended, as long as SLURM knows them.
    """
    states = ["--states=all"] if ended else []
    found = []
    for line in ask(["squeue", "--me", "--array", "--noheader", *states, f"--format={ASKED}"]).splitlines():
        parts = line.split("|", 5)
        if len(parts) < 6:  # of another program's comment, which has several lines
            continue
        job, state, left, place, where, comment = parts
        folder = _run_of(comment, place)
        if folder is None:
            continue
        run = listed(folder, sized=False)
        going = state == "RUNNING"
        ahead = run.max_steps - run.step
        end_s = ahead * run.step_s if going and run.max_steps else math.nan
        limit_s = seconds(left) if going else math.nan
        found.append(Job(job, state, where, limit_s, end_s, run, log_of(Path(comment), job)))
    return found


def _run_of(comment: str, place: str) -> Path | None:
    """The run that a job's comment leads to; None where it is no job of this program."""
    if not comment.startswith("/"):
        return None
    folder = Path(comment)
    if place.isdigit():
        members = _members(folder)
        return members[int(place)] if int(place) < len(members) else None
    return folder if is_run_folder(folder) else None


@cache
def _members(folder: Path) -> list[Path]:
    try:
        return [Path(line) for line in (folder / POINTS).read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []


def _list(found: Sequence[Job], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([_plain(one) for one in found], indent=2))
        return EXIT_OK
    print_columns(COLUMNS, [_cells(one) for one in found], NUMERIC)
    print(f"{len(found)} job{'' if len(found) == 1 else 's'}")
    return EXIT_OK


def _plain(one: Job) -> dict[str, object]:
    run = one.run
    values = {
        **{"job": one.job, "state": one.state, "where": one.where, "limit_s": one.limit_s, "end_s": one.end_s},
        **{"step": run.step, "max_steps": run.max_steps, "loss": run.loss, "tokens_per_s": run.tokens_per_s},
        **{"name": run.name, "run": str(run.folder)},
    }
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}


def _cells(one: Job) -> tuple[str, ...]:
    run = one.run
    begun = run.step > 0
    return (
        one.job,
        one.state.lower(),
        one.where,
        f"{run.step:,}{f'/{run.max_steps:,}' if run.max_steps else ''}",
        numbers.fixed(run.loss, 4) if begun else numbers.MISSING,
        numbers.MISSING if math.isnan(run.tokens_per_s) else numbers.count(run.tokens_per_s),
        numbers.duration(one.limit_s),
        numbers.duration(one.end_s),
        str(run.folder),
    )


def _job(name: str) -> tuple[str, Path | None]:
    """The job that a folder or a number names, and its log; None for a sweep's array.

    Raises:
        RunFolderError: the folder was never submitted.
    """
    folder = Path(name).expanduser().absolute()
    job = job_of(folder)
    if job:
        return job, log_of(folder, job) if is_run_folder(folder) else None
    there = folder.exists()
    known = queued(ended=True) if there or name.replace("_", "").isdigit() else []
    of_it = [one for one in known if (one.run.folder == folder if there else one.job == name)]
    found = max(of_it, key=lambda one: int(one.job.partition("_")[0]), default=None)
    if found is None:
        raise RunFolderError(
            f"{name}: no folder or job that SLURM knows was submitted by this program; see mgpu-pipe jobs"
        )
    return found.job, found.log


def _follow(names: Sequence[str]) -> int:
    """Become ``tail``, which ends with Ctrl-C; the logs of jobs that wait are not there yet."""
    logs = []
    for name in names:
        _, log = _job(name)
        if log is None:
            raise RunFolderError(f"{name}: is a sweep's; follow one of its runs, which mgpu-pipe jobs lists")
        logs.append(str(log))
    command = ["tail", "--lines=+1", "--follow=name", "--retry", *logs]
    os.execvp(command[0], command)


VERB = Verb("your runs under SLURM: list, follow, cancel and requeue them", jobs, first_words=lambda: ACTIONS)
