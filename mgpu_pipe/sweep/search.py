"""Search over a sweep's space: random draws or Optuna's samplers, and the promotion of runs at rungs.

The sweep's store is the only state: each suggestion passes all earlier trials to the sampler. So a search survives its
processes, and several processes can share it. A trial depends on the sweep's seed and its own number, not on the number
of processes.
"""

from __future__ import annotations

import random
import statistics
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.sweep.space import Parameter

if TYPE_CHECKING:
    import optuna


Rule = Literal["asha", "median"]
REDUCTION = 3
"""One in this many runs at a rung is promoted; each rung has this many times the steps of the previous one."""
RUNGS = 3
"""Default number of rungs: at 1/9, 1/3 and all of a run's steps."""
STARTUP = 4
"""Runs at a rung before the median rule applies."""


def rungs_of(steps: int, wanted: Sequence[int] = ()) -> list[int]:
    """Steps of every rung, ascending; the last is the whole run."""
    below = sorted({*wanted} if wanted else {steps // REDUCTION**power for power in range(1, RUNGS)})
    return [*(rung for rung in below if 0 < rung < steps), steps]


def promoted_trials(
    reached: Mapping[int, Mapping[int, float]], rungs: Sequence[int], minimize: bool, rule: Rule
) -> list[int]:
    """Numbers of the runs to promote, those nearest to the end first.

    Args:
        reached: metric at each rung that a run reached, by the run's number.
        rungs: ascending steps; no run is promoted after the last.
    """
    sign = 1.0 if minimize else -1.0
    promotions: list[int] = []
    for index in reversed(range(len(rungs) - 1)):
        rung, later = rungs[index], rungs[index + 1 :]
        here = {number: sign * values[rung] for number, values in reached.items() if rung in values}
        best_first = sorted(here, key=lambda number: (here[number], number))
        if rule == "asha":
            chosen = best_first[: len(here) // REDUCTION]
        else:
            chosen = [number for number in best_first if _among_the_better(number, here)]
        promotions += [number for number in chosen if not any(step in reached[number] for step in later)]
    return promotions


def _among_the_better(number: int, here: Mapping[int, float]) -> bool:
    return len(here) < STARTUP or here[number] <= statistics.median(here.values())


Kind = Literal["random", "tpe", "gp", "nsga2"]
STARTUP_TRIALS = 10
"""Random trials before a sampler learns."""
TPE_STARTUP_TRIALS = 5
"""Random trials before TPE learns: of the 20 trials of a default sweep, ten would be half. Over 400 seeds of
:mod:`benchmarks.accuracy.sweep_search` its regret is 0.84 of random draws' after 12 trials (0.96 with ten), 0.66 after
20 (0.70) and 0.54 after 30 (0.56)."""


@dataclass(frozen=True)
class Tried:
    """A trial, for the sampler.

    Attributes:
        chosen: its values by key, as overrides write them.
        values: one for each metric; empty while it runs, or if it failed.
        ended: whether it is over.
        rungs: its metric at each rung, by step.
    """

    chosen: Mapping[str, str]
    values: Sequence[float] = ()
    ended: bool = True
    rungs: Mapping[int, float] = field(default_factory=dict)


def suggest(
    kind: Kind, space: Sequence[Parameter], tried: Sequence[Tried], minimize: Sequence[bool], seed: int
) -> dict[str, str]:
    """Values of the next trial by key, as overrides write them."""
    place = zlib.crc32(f"{seed}/{len(tried)}".encode())
    if kind == "random":
        generator, chosen = random.Random(place), dict[str, str]()
        for parameter in space:
            if parameter.applies(chosen):
                chosen[parameter.key] = parameter.draw(generator)
        return chosen
    study, whole = _study(kind, minimize, place), 0
    for earlier in tried:
        study.add_trial(_frozen_trial(earlier, space, whole // STARTUP_TRIALS))
        whole += bool(earlier.values)
    trial, chosen = study.ask(), dict[str, str]()
    for parameter in space:
        if parameter.applies(chosen):
            chosen[parameter.key] = _suggest(trial, parameter)
    return chosen


def check_installed(kind: str) -> None:
    """Raise ConfigError that names what to install for this search."""
    from importlib.util import find_spec

    needed = {"grid": (), "random": (), "gp": ("optuna", "scipy")}.get(kind, ("optuna",))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        fix = "pip install 'mgpu_pipe[sweeps]', or use sweep.search=random"
        raise ConfigError("sweep.search", kind, fix, f"{' and '.join(missing)} is not installed")


def _study(kind: Kind, minimize: Sequence[bool], seed: int) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        samplers: dict[str, Any] = {
            "tpe": lambda: optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=TPE_STARTUP_TRIALS, multivariate=True, group=True, constant_liar=True
            ),
            "gp": lambda: optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS),
            "nsga2": lambda: optuna.samplers.NSGAIISampler(seed=seed, population_size=STARTUP_TRIALS),
        }
        directions: list[Any] = ["minimize" if lower else "maximize" for lower in minimize]
        return optuna.create_study(directions=directions, sampler=samplers[kind]())


def _frozen_trial(tried: Tried, space: Sequence[Parameter], generation: int) -> optuna.trial.FrozenTrial:
    """Optuna's form of a trial of an NSGA-II generation; a failed one counts as pruned at once, the worst."""
    from optuna.trial import TrialState, create_trial

    known = [parameter for parameter in space if parameter.key in tried.chosen]
    state = TrialState.COMPLETE if tried.values else TrialState.PRUNED if tried.ended else TrialState.RUNNING
    return create_trial(
        state=state,
        values=list(tried.values) or None,
        params={parameter.key: _value(parameter, tried.chosen[parameter.key]) for parameter in known},
        distributions={parameter.key: _distribution(parameter) for parameter in known},
        intermediate_values=dict(tried.rungs),
        system_attrs={"NSGAIISampler:generation": generation},
    )


def _value(parameter: Parameter, text: str) -> Any:
    if parameter.values:
        return text
    number = min(max(float(text), parameter.low), parameter.high)  # the text's few digits may round it out of the range
    return int(number) if parameter.whole else number


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.values:
        return CategoricalDistribution(parameter.values)
    if parameter.whole:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def _suggest(trial: optuna.Trial, parameter: Parameter) -> str:
    if parameter.values:
        return str(trial.suggest_categorical(parameter.key, parameter.values))
    if parameter.whole:
        return str(trial.suggest_int(parameter.key, int(parameter.low), int(parameter.high), log=parameter.log))
    return parameter.text(trial.suggest_float(parameter.key, parameter.low, parameter.high, log=parameter.log))
