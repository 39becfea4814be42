"""``mgpu-pipe jobs``: lists this user's runs under SLURM by one call of squeue; follows, cancels and requeues them."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser, parse
from mgpu_pipe.errors import EXIT_OK, BadInputError, RunFolderError, print_line, print_text
from mgpu_pipe.launch.slurm.script import POINTS, ask, job_of, log_of, seconds
from mgpu_pipe.report import numbers
from mgpu_pipe.report.columns import print_columns
from mgpu_pipe.runs.latest import is_run_folder
from mgpu_pipe.runs.listing import Listed, list_run
from mgpu_pipe.system.local_files import exists, expand_home

DESCRIPTION = (
    "List this user's runs that SLURM has queued or runs; or follow the output of one, cancel it,\n"
    "or have it saved and queued again. RUN is a run's or a sweep's folder, or a job's number."
)
QUEUE_FORMAT = "%i|%T|%L|%K|%R|%k"
"""Job, state, time left, array index, nodes or reason, and last the comment: a folder with any characters."""
ACTIONS = ("list", "follow", "cancel", "requeue")
COLUMNS = ("job", "state", "nodes or reason", "step", "loss", "tok/s", "limit in", "end in", "run")
NUMERIC = ("step", "loss", "tok/s", "limit in", "end in")


@dataclass(frozen=True)
class Job:
    """A job of a run; times are in seconds, NaN if unknown.

    Attributes:
        job: its number; in an array ``<array>_<index>``.
        state: SLURM's state.
        where: its nodes, or in brackets the reason why it waits.
        limit_s: time until the job's time limit.
        end_s: time until the run's last step, at the speed of its latest step.
        log: output of its tasks.
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
        return _list(list_queued(ended=arguments.all), as_json=arguments.json)
    if not arguments.run:
        raise BadInputError(f"mgpu-pipe jobs {arguments.what}: name a run; see mgpu-pipe jobs")
    if arguments.what == "follow":
        return _follow(arguments.run)
    for name in arguments.run:
        job, _ = _job(name)
        ask(["scancel", job] if arguments.what == "cancel" else ["scontrol", "requeue", job])
        print_line(f"{'cancelled' if arguments.what == 'cancel' else 'queued again'}: {job}")
    return EXIT_OK


def list_queued(*, ended: bool = False) -> list[Job]:
    """This user's jobs of this program in SLURM's order, with ``ended`` ones that SLURM still knows."""
    states = ["--states=all"] if ended else []
    jobs = []
    for line in ask(["squeue", "--me", "--array", "--noheader", *states, f"--format={QUEUE_FORMAT}"]).splitlines():
        parts = line.split("|", 5)
        if len(parts) < 6:  # another program's comment of several lines
            continue
        job, state, left, place, where, comment = parts
        folder = _run_of(comment, place)
        if folder is None:
            continue
        run = list_run(folder, sized=False)
        is_running = state == "RUNNING"
        remaining = run.max_steps - run.step
        end_s = remaining * run.step_s if is_running and run.max_steps else math.nan
        limit_s = seconds(left) if is_running else math.nan
        jobs.append(Job(job, state, where, limit_s, end_s, run, log_of(Path(comment), job)))
    return jobs


def _run_of(comment: str, place: str) -> Path | None:
    """Run folder from a job's comment; None for a job of another program."""
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


def _list(jobs: Sequence[Job], *, as_json: bool) -> int:
    if as_json:
        print_text(json.dumps([_plain(job) for job in jobs], indent=2))
        return EXIT_OK
    print_columns(COLUMNS, [_cells(job) for job in jobs], NUMERIC)
    print_line(f"{len(jobs)} job{'' if len(jobs) == 1 else 's'}")
    return EXIT_OK


def _plain(job: Job) -> dict[str, object]:
    run = job.run
    values = {
        **{"job": job.job, "state": job.state, "where": job.where, "limit_s": job.limit_s, "end_s": job.end_s},
        **{"step": run.step, "max_steps": run.max_steps, "loss": run.loss, "tokens_per_s": run.tokens_per_s},
        **{"name": run.name, "run": str(run.folder)},
    }
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}


def _cells(job: Job) -> tuple[str, ...]:
    run = job.run
    has_steps = run.step > 0
    return (
        job.job,
        job.state.lower(),
        job.where,
        f"{run.step:,}{f'/{run.max_steps:,}' if run.max_steps else ''}",
        numbers.fix_decimals(run.loss, 4) if has_steps else numbers.MISSING,
        numbers.MISSING if math.isnan(run.tokens_per_s) else numbers.count(run.tokens_per_s),
        numbers.duration(job.limit_s),
        numbers.duration(job.end_s),
        str(run.folder),
    )


def _job(name: str) -> tuple[str, Path | None]:
    """Job of a folder or a number, and its log (None for an array); RunFolderError if never submitted."""
    folder = expand_home(name).absolute()
    job = job_of(folder)
    if job:
        return job, None if exists(folder / POINTS) else log_of(folder, job)
    there = exists(folder)
    known = list_queued(ended=True) if there or name.replace("_", "").isdigit() else []
    matches = [candidate for candidate in known if (candidate.run.folder == folder if there else candidate.job == name)]
    newest = max(matches, key=lambda candidate: int(candidate.job.partition("_")[0]), default=None)
    if newest is None:
        raise RunFolderError(
            f"{name}: no folder or job that SLURM knows was submitted by this program; see mgpu-pipe jobs"
        )
    return newest.job, newest.log


def _follow(names: Sequence[str]) -> int:
    """Replace this process by ``tail``, until Ctrl-C; logs of waiting jobs do not exist yet."""
    logs = []
    for name in names:
        _, log = _job(name)
        if log is None:
            raise RunFolderError(f"{name}: is a sweep's; follow one of its runs, which mgpu-pipe jobs lists")
        logs.append(str(log))
    command = ["tail", "--lines=+1", "--follow=name", "--retry", *logs]
    os.execvp(command[0], command)


VERB = Verb("your runs under SLURM: list, follow, cancel and requeue them", jobs, first_words=lambda: ACTIONS)
