"""Starts a sweep, or adds points to an existing one."""

from __future__ import annotations

import itertools
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from mgpu_pipe.config.group_keys import EvalConfig, SweepConfig
from mgpu_pipe.config.hydra import command_line as hydra_cli
from mgpu_pipe.config.hydra.command_line import SweepRequest
from mgpu_pipe.config.hydra.compose import Composition
from mgpu_pipe.config.objective import description, metric_of, rankable_metrics
from mgpu_pipe.config.schema import DataConfig, ObjectiveConfig
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import EXIT_BAD_INPUT, BadInputError, ConfigError, ConfigErrors, one_line, print_line, raised_by
from mgpu_pipe.launch.compositions import WORST_LAST, check_composition, each_point, errors_of, launch_composition
from mgpu_pipe.sweep.point import FAILED, Point
from mgpu_pipe.sweep.run_points import conclude, grid, parsed_again, run_composed, with_seeds, work
from mgpu_pipe.sweep.search import check_installed, rungs_of
from mgpu_pipe.sweep.slurm_array import submit_sweep
from mgpu_pipe.sweep.space import Parameter, as_record, flat, from_record, order_by_conditions, parameter
from mgpu_pipe.sweep.store import Store, create
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.local_files import expand_home

MEASURED = (
    "throughput/tokens_per_s",
    "throughput/samples_per_s",
    "throughput/step_s",
    "throughput/mfu",
    "memory/peak_gib",
)
"""Metrics of every run next to its objective's; memory on GPUs only."""
SPACE = "sweep.space."
LOWER_IS_BETTER = ("throughput/step_s", "memory/peak_gib")


def start(parsed: Namespace, words: Sequence[str]) -> int:
    """Create and run the sweep of ``words``; returns the exit code, ConfigErrors if nothing can run."""
    from mgpu_pipe.checks.start import is_joined

    if is_joined():
        raise BadInputError("-m: a world that torchrun or srun started trains one run; start a world for each")
    on_slurm = "hydra/launcher=slurm" in parsed.overrides
    if on_slurm and not any(word.lstrip("+").startswith("launch=") for word in parsed.overrides):
        parsed.overrides.append("launch=slurm")
    request = hydra_cli.read_sweep(parsed)
    spec = spec_of(request, words)
    if request.plain and request.launcher == "slurm":
        return submit_sweep(request, spec, ["mgpu-pipe", *words])
    if not request.plain:
        return _by_hydra(parsed, create(expand_home(request.config.run.root), request.config.sweep.name, spec))
    for word in words:
        if word.lstrip("+~").startswith("hydra.sweep."):
            where = "the sweep's folder is <run.root>/sweeps/<sweep.name>"
            print_line(f"note: {one_line(word)}: does nothing here: {where}", file=sys.stderr)
    root, name = expand_home(request.config.run.root), request.config.sweep.name
    if spec["search"] != "grid":
        corners = ends(from_record(spec["space"]))  # type: ignore[arg-type]
        if errors := errors_by_point(request.flags, request.fixed, [corners]):
            raise _without_repeats(errors)
        return work(create(root, name, spec), ["mgpu-pipe", *words])
    trials = grid(request)
    refused = errors_by_point(request.flags, request.fixed, trials)
    if len(refused) == sum(map(len, trials)):
        raise _without_repeats(refused)
    store = create(root, name, spec, trials)
    refuse(store, store.points(), refused)
    return work(store, ["mgpu-pipe", *words])


def spec_of(request: SweepRequest, words: Sequence[str]) -> dict[str, object]:
    """Entries of ``sweep.json``; ConfigErrors if the sweep's keys are wrong."""
    config, settings = request.config, request.config.sweep
    errors: list[BadInputError] = [*_whole_sweep_errors(request)]
    metrics = [settings.metric] if isinstance(settings.metric, str) else list(settings.metric)
    metrics = [_usual_metric(config.data, config.objective) if metric == "auto" else metric for metric in metrics]
    for metric in metrics:
        errors += raised_by(lambda metric=metric: _check_metric(config.data, config.objective, config.eval, metric))  # type: ignore[misc]
    errors += _search_errors(settings, config.trainer.max_steps, config.checkpoint.save_last, len(metrics))
    by_key: dict[str, Parameter] = {}
    for key, value in [*flat(settings.space), *_typed_space(request)] if settings.search != "grid" else ():
        try:
            by_key[key] = parameter(key, value)
        except ConfigError as error:
            errors.append(error)
    space: list[Parameter] = []
    if not errors:
        errors += raised_by(lambda: space.extend(order_by_conditions(by_key)))
    if settings.search != "grid" and not space and not errors:
        fix = "give ranges or lists, such as optimizer.lr=interval(1e-5,1e-3) or sweep.space.optimizer.lr"
        errors.append(ConfigError("sweep.search", settings.search, fix, "the space is empty"))
    if errors:
        raise ConfigErrors(errors)
    return {
        "words": list(words),
        "cwd": os.getcwd(),
        "flags": [flag for flag in request.flags if not flag.lstrip("+").startswith("hydra.")],
        "fixed": [*(flag for flag in request.flags if flag.lstrip("+").startswith("hydra.")), *request.fixed],
        "seed": config.seed,
        "seeds": settings.seeds,
        "metrics": metrics,
        "minimize": [
            settings.direction == "minimize"
            if settings.direction != "auto"
            else _lower_is_better(config.objective, config.eval, metric)
            for metric in metrics
        ],
        "diverged_above": settings.diverged_above,
        "search": settings.search,
        "trials": settings.trials,
        "space": as_record(space),
        "pruner": settings.pruner,
        "rungs": [] if settings.pruner == "none" else rungs_of(config.trainer.max_steps or 0, settings.rungs),
        "parallel": settings.parallel,
    }


def _whole_sweep_errors(request: SweepRequest) -> Iterator[BadInputError]:
    """Errors of keys that have one value for the whole sweep."""
    config, settings = request.config, request.config.sweep
    if not config.run.root.strip():
        yield ConfigError("run.root", config.run.root, "give a folder, or leave it out")
    if config.run.dir is not None:
        yield ConfigError("run.dir", config.run.dir, "leave it out with -m: every run has its own folder")
    if settings.seeds < 1:
        yield ConfigError("sweep.seeds", settings.seeds, "use a whole number of at least 1")
    if settings.seeds > 1 and "seed" in request.values:
        yield ConfigError("sweep.seeds", settings.seeds, "leave it out, or sweep no seed", "seeds are swept")
    whole = [key for key in request.values if key.startswith("sweep.") and not key.startswith(SPACE)]
    whole += [key for key in request.values if key in ("run.root", "run.dir")]
    for key in whole:
        yield ConfigError(key, "...", "give one value", "it is the whole sweep's")


def _search_errors(sweep: SweepConfig, steps: int | None, saves_last: bool, metrics: int) -> Iterator[BadInputError]:
    """Errors of sweep keys that exclude each other."""
    yield from raised_by(lambda: check_installed(sweep.search))
    for key, value in (("trials", sweep.trials), ("parallel", sweep.parallel)):
        if value < 1:
            yield ConfigError(f"sweep.{key}", value, "use a whole number of at least 1")
    if metrics not in (1, 2) or (metrics == 2 and sweep.search in ("gp", "tpe")):
        yield ConfigError("sweep.metric", sweep.metric, "give one, or two with sweep.search=grid, random or nsga2")
    if sweep.search == "nsga2" and metrics != 2:
        yield ConfigError("sweep.search", "nsga2", "give two, sweep.metric=[a,b]", "it weighs two metrics")
    if sweep.search != "grid" and sweep.points is not None:
        yield ConfigError("sweep.points", sweep.points, "leave it out, or use sweep.search=grid", "points are drawn")
    if sweep.space and sweep.search == "grid":
        fix = "choose sweep.search=random, tpe, gp or nsga2"
        yield ConfigError("sweep.space", "{...}", fix, "a grid has no ranges; its values are lists")
    if sweep.pruner == "none":
        if sweep.rungs:
            yield ConfigError("sweep.rungs", sweep.rungs, "choose sweep.pruner=asha or median", "no point is pruned")
        return
    if beyond := [rung for rung in sweep.rungs if not 0 < rung < (steps or 0)]:
        fix = f"give steps from 1 to {(steps or 1) - 1}, below trainer.max_steps={steps}"
        yield ConfigError("sweep.rungs", sweep.rungs, fix, f"{beyond[0]} is not a step before the last")
    why = "sweep.pruner trains in parts"
    if steps is None or steps < 3:
        yield ConfigError("trainer.max_steps", steps, "give the steps of a whole run", why)
    if not saves_last:
        yield ConfigError("checkpoint.save_last", False, "leave it at true", why)
    if metrics == 2 or sweep.seeds > 1:
        yield ConfigError("sweep.pruner", sweep.pruner, "use one metric and sweep.seeds=1", "it ranks single runs")


def _typed_space(request: SweepRequest) -> Iterator[tuple[str, Any]]:
    """Values and ranges of the command line, by key."""
    for key, values in request.values.items():
        listed = [value.partition("=")[2] for value in values] if isinstance(values, list) else values
        yield key.removeprefix(SPACE), listed


def _lower_is_better(objective: ObjectiveConfig, tasks: EvalConfig, metric: str) -> bool:
    known = metric_of(objective, tasks, metric)
    return metric in LOWER_IS_BETTER or not (metric in MEASURED or (known is not None and known.higher_is_better))


def ends(space: Sequence[Parameter]) -> list[list[str]]:
    """Points to check before a search: each choice or end once where its condition holds, others at their first."""
    points: list[list[str]] = []
    for searched in space:
        for value in searched.ends:
            chosen: dict[str, str] = dict(searched.when or {})
            chosen[searched.key] = value
            for other in space:
                if other.key not in chosen and other.applies(chosen):
                    chosen[other.key] = other.ends[0]
            points.append([f"{key}={value}" for key, value in chosen.items()])
    return points


def errors_by_point(
    flags: Sequence[str], fixed: Sequence[str], trials: Iterable[Iterable[Sequence[str]]]
) -> dict[int, list[BadInputError]]:
    """Errors of each point that cannot run, by its index."""
    points = [list(overrides) for runs in trials for overrides in runs]
    parsed = parsed_again(flags, fixed)
    composed = hydra_cli.compose_each(parsed, points)
    return {index: errors for index, composition in enumerate(composed) if (errors := errors_of(composition))}


def _without_repeats(errors: Mapping[int, list[BadInputError]]) -> ConfigErrors:
    """The distinct errors of several points."""
    return ConfigErrors(list({str(error): error for several in errors.values() for error in several}.values()))


def refuse(store: Store, points: Sequence[Point], refused: dict[int, list[BadInputError]]) -> None:
    """Record and print the points that cannot run."""
    for index, errors in refused.items():
        point, reason = points[index], "; ".join(one_line(error) for error in errors)
        overrides = " ".join(point.overrides)
        print_line(f"error: point {point.number} ({one_line(overrides)}) cannot run: {reason}", file=sys.stderr)
        store.change(point, status=FAILED, reason=reason, exit_code=EXIT_BAD_INPUT)


def _usual_metric(data: DataConfig, objective: ObjectiveConfig) -> str:
    held_out = data.validation_fraction > 0 or data.validation_paths
    return description(objective.name).headline.key if held_out else "train/loss"


def _check_metric(data: DataConfig, objective: ObjectiveConfig, tasks: EvalConfig, metric: str) -> None:
    known = [*rankable_metrics(objective, tasks), *MEASURED]
    if metric not in known:
        raise ConfigError("sweep.metric", metric, choose_from(metric, known), "no run logs it")
    if metric.startswith("val/") and not (data.validation_fraction > 0 or data.validation_paths):
        fix = "use train/loss, or hold data out with data.validation_fraction"
        raise ConfigError("sweep.metric", metric, fix, "no data is held out, so no run measures it")


def _by_hydra(parsed: Namespace, store: Store) -> int:
    """Let another Hydra sweeper or launcher choose the points; each is stored when it arrives."""
    words = ["mgpu-pipe", *map(str, store.spec["words"])]

    def job(composition: Composition) -> int:
        if int(existing_world(os.environ).get("RANK", "0")):  # of a job's tasks, rank 0 alone records
            check_composition(composition)
            return launch_composition(composition, words).exit_code
        (point,) = store.add([[[*composition.swept]]])
        return run_composed(store, point, composition, words)

    code = each_point(parsed, job, keep=True)
    return max(code, conclude(store), key=WORST_LAST.index)


def extend(store: Store, words: Sequence[str]) -> None:
    """Add all combinations of ``words`` with the present values of other keys; BadInputError if none is new."""
    spec = store.spec
    if any(word.startswith("sweep.seeds=") for word in words):
        return _more_seeds(store, words)
    if spec["search"] != "grid":
        key, _, number = words[0].partition("=")
        if len(words) > 1 or key != "sweep.trials" or not number.isdigit() or int(number) <= spec["trials"]:
            raise BadInputError(f"{' '.join(words)}: a search is extended by sweep.trials=N, above {spec['trials']}")
        return store.amend(trials=int(number))
    while not _extend(store, words):
        pass


def _extend(store: Store, words: Sequence[str]) -> bool:
    """Add the points; False if another process added points meanwhile."""
    spec = store.spec
    known = hydra_cli.read_sweep(parsed_again(spec["flags"], [*spec["fixed"], *words]))
    before = list(spec["fixed"])
    choices = [[_normal(word)] for word in known.fixed if word not in before]
    choices += [values for values in known.values.values() if isinstance(values, list)]
    if len(choices) < len(known.values):
        raise BadInputError(f"{' '.join(words)}: list values, a,b,c; a range cannot be enumerated")
    keys = {_key(values[0]) for values in choices}
    points = store.points()
    others: dict[str, dict[str, None]] = {}
    for point in points:
        for override in point.overrides:
            if _key(override) not in keys and not (_key(override) == "seed" and spec["seeds"] > 1):
                others.setdefault(_key(override), {})[override] = None
    there = {_setting(point, spec["seeds"]) for point in points}
    settings = list(itertools.product(*map(list, others.values()), *choices))
    trials = [with_seeds(list(point), spec["seed"], spec["seeds"]) for point in settings]
    new = [runs for runs, point in zip(trials, settings, strict=True) if frozenset(point) not in there]
    if not new:
        raise BadInputError(f"{' '.join(words)}: the sweep {store.name} has these points already")
    refused = errors_by_point(spec["flags"], spec["fixed"], new)
    added = store.add(new, after=_last(points))
    refuse(store, added, refused if added else {})
    return bool(added)


def _more_seeds(store: Store, words: Sequence[str]) -> None:
    """Repeat every trial with further seeds."""
    spec, number = store.spec, words[0].partition("=")[2]
    points = store.points()
    if len(words) > 1 or not number.isdigit() or int(number) <= spec["seeds"]:
        raise BadInputError(f"{' '.join(words)}: give sweep.seeds=N alone, above {spec['seeds']}")
    if spec["rungs"] or (spec["seeds"] == 1 and any("seed" in point.settings for point in points)):
        why = "sweep.pruner ranks single runs" if spec["rungs"] else "the sweep's points differ in their seeds"
        raise BadInputError(f"{words[0]}: cannot be added here: {why}")
    wanted = [spec["seed"] + offset for offset in range(int(number))]
    by_trial: dict[int, list[Point]] = {}
    for point in points:
        by_trial.setdefault(point.trial, []).append(point)
    last = _last(points)
    for trial, runs in by_trial.items():
        there = {int(run.settings.get("seed", spec["seed"])) for run in runs}
        setting = [override for override in runs[0].overrides if spec["seeds"] == 1 or _key(override) != "seed"]
        if missing := [[*setting, f"seed={seed}"] for seed in wanted if seed not in there]:
            added = store.add([missing], after=last, trial=trial)
            if not added:  # another process added points meanwhile
                return _more_seeds(store, words)
            last = _last(added)
    store.amend(seeds=int(number))  # last: after a kill, the same command adds the rest


def _last(points: Sequence[Point]) -> int:
    return points[-1].number if points else 0


def _setting(point: Point, seeds: int) -> frozenset[str]:
    """The overrides that identify a point's trial, without the seed of a repetition."""
    return frozenset(override for override in point.overrides if seeds == 1 or _key(override) != "seed")


def _normal(override: str) -> str:
    """An override as Hydra writes swept values: ``1e-3`` becomes ``0.001``."""
    parsed = OverridesParser.create().parse_override(override)
    return f"{parsed.get_key_element()}={parsed.get_value_element_as_str()}"


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
