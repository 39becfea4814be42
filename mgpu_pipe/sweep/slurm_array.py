"""A sweep as one SLURM array: every point is checked and frozen on the login node, then submitted by one ``sbatch``."""

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

from mgpu_pipe.config.group_keys import SweepConfig
from mgpu_pipe.config.hydra import command_line as hydra_cli
from mgpu_pipe.config.hydra.command_line import SweepRequest
from mgpu_pipe.config.hydra.compose import Composition
from mgpu_pipe.config.schema import LaunchConfig
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError, ConfigErrors, one_line, print_line
from mgpu_pipe.launch.compositions import errors_of
from mgpu_pipe.launch.signals import taken_over
from mgpu_pipe.launch.slurm import submit_job as slurm
from mgpu_pipe.launch.slurm.script import POINTS, batch_script, job_of
from mgpu_pipe.launch.slurm.slurm_keys import SlurmConfig
from mgpu_pipe.runs import record, run_folder
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.runs.run_folder import RunFolder
from mgpu_pipe.sweep.point import FINISHED, RESUMABLE, Point
from mgpu_pipe.sweep.run_points import grid, parsed_again, resume_line
from mgpu_pipe.sweep.store import Store, check_name, create, writing
from mgpu_pipe.system.local_files import expand_home


def submit_sweep(request: SweepRequest, spec: dict[str, object], command: Sequence[str]) -> int:
    """Submit a new sweep as an array; returns the exit code.

    Args:
        spec: entries of ``sweep.json``.

    Raises:
        BadInputError: a point cannot run, or SLURM refuses; nothing is submitted or left behind.
    """
    slurm.check_commands()
    errors = list(_errors(request.config.launch, request.config.sweep))
    if errors:
        raise ConfigErrors(errors)
    root, name = expand_home(request.config.run.root), request.config.sweep.name
    check_name(root, name)
    trials = grid(request)
    overrides = [point for runs in trials for point in runs]
    compositions = _compose(spec, dict(enumerate(overrides, 1)))
    run_folders: list[RunFolder] = []
    store = None
    before = taken_over(_interrupt)  # removes the new folders
    try:
        for composition in compositions.values():
            run_folders.append(_freeze(composition, command, run_folders))
        folders = [str(folder.paths.root) for folder in run_folders]
        store = create(root, name, {**spec, "launcher": "slurm"}, trials, folders)
        return _submit(store, store.points(), compositions[1], command)
    except BaseException:
        for folder in run_folders:
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


def submit_left(store: Store, command: Sequence[str], numbers: Collection[int]) -> int:
    """Submit an array of the waiting and stopped points; returns the exit code.

    Args:
        numbers: points to run; empty: all.

    Raises:
        BadInputError: an array of the sweep is still queued or running, or SLURM refuses.
    """
    slurm.check_commands()
    with RunLock(store.folder / "lock"):
        slurm.refuse_queued(store.folder)
        return _submit_left(store, command, numbers)


def _submit_left(store: Store, command: Sequence[str], numbers: Collection[int]) -> int:
    points = [point for point in store.points() if not numbers or point.number in numbers]
    left = [point for point in points if point.status in RESUMABLE]
    if not left:
        print_line(
            f"no point is left to run: {sum(point.status == FINISHED for point in points)} of {len(points)} finished"
        )
        return EXIT_OK
    new = {point.number: list(point.overrides) for point in left if not point.folder}
    compositions = _compose(store.spec, new or {left[0].number: list(left[0].overrides)})
    run_folders: list[RunFolder] = []
    for point in left:
        if not point.folder:
            run_folders.append(_freeze(compositions[point.number], command, run_folders))
            store.change(point, folder=str(run_folders[-1].paths.root))
    return _submit(store, left, next(iter(compositions.values())), command)


def _errors(launch: LaunchConfig, sweep: SweepConfig) -> Iterator[BadInputError]:
    """Errors of the sweep keys that an array does not support."""
    why = "an array's points are all known when it is submitted"
    if not isinstance(launch, SlurmConfig):
        fix = "use launch=slurm, or an option of yours with type: slurm"
        yield ConfigError("launch.type", launch.type, fix, "hydra/launcher=slurm submits jobs")
    if sweep.search != "grid":
        yield ConfigError("sweep.search", sweep.search, "use grid, or hydra/launcher=basic on one machine", why)
    if sweep.pruner != "none":
        yield ConfigError("sweep.pruner", sweep.pruner, "leave it out, or use hydra/launcher=basic", why)
    if sweep.parallel != 1:
        fix = "leave it out; launch.array_limit sets how many jobs run at the same time"
        yield ConfigError("sweep.parallel", sweep.parallel, fix)


def _compose(spec: Mapping[str, object], points: Mapping[int, list[str]]) -> dict[int, Composition]:
    """Checked compositions of the points by number; prints errors of points, then raises BadInputError."""
    parsed = parsed_again(list(map(str, _as_list(spec["flags"]))), list(map(str, _as_list(spec["fixed"]))))
    compositions: dict[int, Composition] = {}
    bad, first = 0, ""
    for (number, overrides), composition in zip(
        points.items(), hydra_cli.compose_each(parsed, points.values()), strict=True
    ):
        composition.swept = overrides
        errors: list[BadInputError] = []
        try:
            if not composition.errors:
                composition.config = slurm.fit_to_nodes(composition.config)
                run = composition.config.run
                slurm.check_folder(composition.config.run, expand_home(run.root).absolute() / run.name)
            errors = errors_of(composition)
        except ConfigError as error:
            errors = [error]
        if not errors:
            job_script = batch_script(
                slurm.slurm_keys(composition.config.launch), composition.config.trainer, Path("/"), "sweep", [], 1
            )
            first = first or job_script
            if job_script != first:
                why = "it asks the cluster for something else than the first point, and an array asks the same for all"
                errors = [BadInputError(why)]
        if errors:
            bad += 1
            reason = "; ".join(one_line(error) for error in errors)
            print_line(f"error: point {number} ({one_line(' '.join(overrides))}) cannot run: {reason}", file=sys.stderr)
        compositions[number] = composition
    if bad:
        raise BadInputError(f"{bad} of {len(points)} points cannot run; nothing was submitted")
    return compositions


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _submit(store: Store, points: Sequence[Point], any_point: Composition, command: Sequence[str]) -> int:
    """Submit these points, whose folders exist."""
    launch, trainer = slurm.slurm_keys(any_point.config.launch), any_point.config.trainer
    folders = [point.folder for point in store.points()]
    with writing(store.folder):
        (store.folder / "logs").mkdir(exist_ok=True)
        (store.folder / POINTS).write_text("".join(f"{folder}\n" for folder in folders), encoding="utf-8")
        script = slurm.write_script(launch, trainer, store.folder, store.name, command, len(folders))
    os.sync()  # once: flushing each file takes 100 times as long
    limit = f"%{launch.array_limit}" if launch.array_limit else ""
    places = ",".join(str(point.number - 1) for point in points)
    whole = len(points) == len(folders)
    job = slurm.sbatch(launch, trainer, script, [] if whole else [f"--array={places}{limit}"])
    print_line("follow: mgpu-pipe jobs", file=sys.stderr)
    print_line(f"cancel: {resume_line(store, 'cancel')}", file=sys.stderr)
    print_line(f"resume: {resume_line(store)}", file=sys.stderr)
    print_line(f"job: {job}")
    print_line(f"sweep: {store.folder}", flush=True)
    return EXIT_OK


def _freeze(composition: Composition, command: Sequence[str], earlier: Sequence[RunFolder]) -> RunFolder:
    """Create the run's folder, its first files and its configuration."""
    config = composition.config
    folder = run_folder.choose_folder(config, swept=composition.swept, flush=False)
    dated = time.time()
    if not earlier or earlier[-1].paths.root.parent != folder.paths.root.parent:
        dated = record.later_than_others(folder.paths, dated, config.run)
    folder = record.begin(folder, config, composition.overrides, command, dated=dated, flush=False)
    folder.paths.logs.mkdir(exist_ok=True)
    return folder
