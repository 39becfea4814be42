"""A sweep as one array of jobs: every point checked and frozen on the login node, one ``sbatch``. No torch."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mgpu_pipe.config import hydra_cli
from mgpu_pipe.config.compose import Composition
from mgpu_pipe.config.hydra_cli import SweepWords
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError, ConfigErrors, one_line
from mgpu_pipe.launch import slurm
from mgpu_pipe.launch.composed import errors_of
from mgpu_pipe.launch.slurm_keys import SlurmConfig
from mgpu_pipe.launch.slurm_script import batch_script
from mgpu_pipe.launch.slurm_submitted import POINTS, job_of
from mgpu_pipe.launch.stop import taken_over
from mgpu_pipe.runs import folder as run_folder
from mgpu_pipe.runs import record
from mgpu_pipe.runs.folder import RunFolder
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.sweep.grid import grid
from mgpu_pipe.sweep.point import FINISHED, GOES_ON, Point
from mgpu_pipe.sweep.store import Store, check_name, create, writing
from mgpu_pipe.sweep.work import parsed_again, resume_line


def submit_sweep(asked: SweepWords, wanted: dict[str, object], command: Sequence[str]) -> int:
    """Begin the sweep as an array; returns the exit code.

    Args:
        wanted: what its store keeps.

    Raises:
        BadInputError: a point cannot run, or SLURM refuses; nothing is left then, and nothing was submitted.
    """
    slurm.check_commands()
    errors = list(_errors(asked.config))
    if errors:
        raise ConfigErrors(errors)
    root, name = Path(asked.config.run.root).expanduser(), asked.config.sweep.name
    check_name(root, name)
    trials = grid(asked)
    overrides = [point for runs in trials for point in runs]
    made = _composed(wanted, dict(enumerate(overrides, 1)))
    begun: list[RunFolder] = []
    store = None
    before = taken_over(_interrupt)  # what was begun is removed
    try:
        for composition in made.values():
            begun.append(_freeze(composition, command, begun))
        folders = [str(folder.paths.root) for folder in begun]
        store = create(root, name, {**wanted, "launcher": "slurm"}, trials, folders)
        return _submit(store, store.points(), made[1].config, command)
    except BaseException:
        for folder in begun:
            folder.discard()
        if store is not None:
            if job := job_of(store.folder):
                slurm.cancel(job)
            shutil.rmtree(store.folder)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def submit_left(store: Store, command: Sequence[str], numbers: Collection[int] = ()) -> int:
    """Submit an array of what waits or was stopped; returns the exit code.

    Args:
        numbers: of the points to run; none: all.

    Raises:
        BadInputError: an array of the sweep is still queued or running, or SLURM refuses.
    """
    slurm.check_commands()
    with RunLock(store.folder / "lock"):
        slurm.refuse_queued(store.folder)
        return _submit_left(store, command, numbers)


def _submit_left(store: Store, command: Sequence[str], numbers: Collection[int]) -> int:
    points = [point for point in store.points() if not numbers or point.number in numbers]
    left = [point for point in points if point.status in GOES_ON]
    if not left:
        print(f"nothing is left to run: {sum(point.status == FINISHED for point in points)} of {len(points)} finished")
        return EXIT_OK
    new = {point.number: list(point.overrides) for point in left if not point.folder}
    made = _composed(store.asked, new or {left[0].number: list(left[0].overrides)})
    begun: list[RunFolder] = []
    for point in left:
        if not point.folder:
            begun.append(_freeze(made[point.number], command, begun))
            store.change(point, folder=str(begun[-1].paths.root))
    return _submit(store, left, next(iter(made.values())).config, command)


def _errors(config: RunConfig) -> Iterator[BadInputError]:
    """What an array cannot do, of the sweep's own keys."""
    sweep, why = config.sweep, "an array's points are all known when it is submitted"
    if not isinstance(config.launch, SlurmConfig):
        fix = "use launch=slurm, or an option of yours with type: slurm"
        yield ConfigError("launch.type", config.launch.type, fix, "hydra/launcher=slurm submits jobs")
    if sweep.search != "grid":
        yield ConfigError("sweep.search", sweep.search, "use grid, or hydra/launcher=basic on one machine", why)
    if sweep.pruner != "none":
        yield ConfigError("sweep.pruner", sweep.pruner, "leave it out, or use hydra/launcher=basic", why)
    if sweep.parallel != 1:
        fix = "leave it out; launch.array_limit says how many jobs run at the same time"
        yield ConfigError("sweep.parallel", sweep.parallel, fix)


def _composed(wanted: Mapping[str, object], points: Mapping[int, list[str]]) -> dict[int, Composition]:
    """The points by number, checked, as they hold on the nodes.

    Raises:
        BadInputError: some cannot run, each of which is told.
    """
    parsed = parsed_again(list(map(str, _listed(wanted["flags"]))), list(map(str, _listed(wanted["fixed"]))))
    made: dict[int, Composition] = {}
    bad, first = 0, ""
    for (number, overrides), composition in zip(
        points.items(), hydra_cli.compose_each(parsed, points.values()), strict=True
    ):
        composition.swept = overrides
        errors: list[BadInputError] = []
        try:
            if not composition.errors:
                composition.config = slurm.settled(composition.config)
                run = composition.config.run
                slurm.check_folder(composition.config, Path(run.root).expanduser().absolute() / run.name)
            errors = errors_of(composition)
        except ConfigError as error:
            errors = [error]
        if not errors:
            asks = batch_script(composition.config, Path("/"), "sweep", [], 1)
            first = first or asks
            if asks != first:
                why = "it asks the cluster for something else than the first point, and an array asks the same for all"
                errors = [BadInputError(why)]
        if errors:
            bad += 1
            reason = "; ".join(one_line(error) for error in errors)
            print(f"error: point {number} ({one_line(' '.join(overrides))}) cannot run: {reason}", file=sys.stderr)
        made[number] = composition
    if bad:
        raise BadInputError(f"{bad} of {len(points)} points cannot run; nothing was submitted")
    return made


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _submit(store: Store, points: Sequence[Point], config: RunConfig, command: Sequence[str]) -> int:
    """Submit these points, which have their folders; ``config`` is that of any."""
    folders = [point.folder for point in store.points()]
    with writing(store.folder):
        (store.folder / "logs").mkdir(exist_ok=True)
        (store.folder / POINTS).write_text("".join(f"{folder}\n" for folder in folders), encoding="utf-8")
        script = slurm.write_script(config, store.folder, command, store.name, len(folders))
    os.sync()  # at once, for a run's files one by one would take a hundred times as long
    assert isinstance(config.launch, SlurmConfig)
    limit = f"%{config.launch.array_limit}" if config.launch.array_limit else ""
    places = ",".join(str(point.number - 1) for point in points)
    whole = len(points) == len(folders)
    job = slurm.sbatch(config, script, [] if whole else [f"--array={places}{limit}"])
    print("follow: mgpu-pipe jobs", file=sys.stderr)
    print(f"cancel: {resume_line(store, 'cancel')}", file=sys.stderr)
    print(f"resume: {resume_line(store)}", file=sys.stderr)
    print(f"job: {job}")
    print(f"sweep: {store.folder}", flush=True)
    return EXIT_OK


def _freeze(composition: Composition, command: Sequence[str], earlier: Sequence[RunFolder]) -> RunFolder:
    """Make the run's folder, its first files and its configuration."""
    config = composition.config
    folder = run_folder.choose_folder(config, swept=composition.swept, flush=False)
    dated = time.time()
    if not earlier or earlier[-1].paths.root.parent != folder.paths.root.parent:
        dated = record.later_than_others(folder.paths, dated, config)
    folder = record.begin(folder, config, composition.overrides, command, dated=dated, flush=False)
    folder.paths.logs.mkdir(exist_ok=True)
    return folder
