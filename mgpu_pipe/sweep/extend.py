"""Adds points to an existing sweep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from mgpu_pipe.config.hydra import command_line as hydra_cli
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.sweep.point import Point
from mgpu_pipe.sweep.run_points import parsed_again, with_seeds
from mgpu_pipe.sweep.start_sweep import errors_by_point, refuse
from mgpu_pipe.sweep.store import Store


def extend(store: Store, words: Sequence[str]) -> None:
    """Add every combination of the values in ``words`` with the present values of the sweep's other keys.

    Raises:
        BadInputError: ``words`` cannot be read, or all of their points exist.
    """
    spec = store.spec
    if any(word.startswith("sweep.seeds=") for word in words):
        return _more_seeds(store, words)
    if spec["search"] != "grid":
        key, _, number = words[0].partition("=")
        if len(words) > 1 or key != "sweep.trials" or not number.isdigit() or int(number) <= spec["trials"]:
            raise BadInputError(f"{' '.join(words)}: a search is extended by sweep.trials=N, above {spec['trials']}")
        return store.amend(trials=int(number))
    while not _extended(store, words):
        pass


def _extended(store: Store, words: Sequence[str]) -> bool:
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
