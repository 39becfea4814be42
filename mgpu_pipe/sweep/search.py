"""What a search tries next, from what the sweep's store holds: drawn at random, or asked of Optuna's samplers.

Nothing is kept but the sweep's store: the sampler hears of all earlier trials each time. So a search survives
whatever its processes do not, and several of them search together. A trial is drawn from the sweep's seed and its own
place, not from how many processes there are.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.sweep.space import Parameter

if TYPE_CHECKING:
    import optuna

Kind = Literal["random", "tpe", "gp", "nsga2"]
STARTUP_TRIALS = 10
"""Drawn at random before a sampler has something to learn from."""
TPE_STARTUP_TRIALS = 5
"""Of TPE, which learns from so few: of the 20 trials that a sweep has by default, ten would be half. Over 400 seeds of
:mod:`benchmarks.sweep_search` its regret is 0.84 of random draws' after 12 trials (0.96 with ten), 0.66 after 20 (0.70)
and 0.54 after 30 (0.56)."""


@dataclass(frozen=True)
class Tried:
    """A trial so far.

    Attributes:
        chosen: its values by key, as overrides write them.
        values: what it reached, one for each metric; empty while it runs, or where it ended badly.
        ended: whether it has.
        rungs: what it reached after how many steps, where it was pruned.
    """

    chosen: Mapping[str, str]
    values: Sequence[float] = ()
    ended: bool = True
    rungs: Mapping[int, float] = field(default_factory=dict)


def suggest(
    kind: Kind, space: Sequence[Parameter], tried: Sequence[Tried], minimize: Sequence[bool], seed: int
) -> dict[str, str]:
    """The values of the next trial, by key, as overrides write them."""
    place = zlib.crc32(f"{seed}/{len(tried)}".encode())
    if kind == "random":
        generator, chosen = random.Random(place), dict[str, str]()
        for one in space:
            if one.applies(chosen):
                chosen[one.key] = one.drawn(generator)
        return chosen
    study, whole = _study(kind, minimize, place), 0
    for earlier in tried:
        study.add_trial(_told(earlier, space, whole // STARTUP_TRIALS))
        whole += bool(earlier.values)
    trial, chosen = study.ask(), dict[str, str]()
    for one in space:
        if one.applies(chosen):
            chosen[one.key] = _asked(trial, one)
    return chosen


def check_installed(kind: str) -> None:
    """Raise unless what this search needs is there.

    Raises:
        ConfigError: naming what to install.
    """
    from importlib.util import find_spec

    needed = {"grid": (), "random": (), "gp": ("optuna", "scipy")}.get(kind, ("optuna",))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        fix = "pip install 'mgpu_pipe[sweeps]', or use sweep.search=random"
        raise ConfigError("sweep.search", kind, fix, f"{' and '.join(missing)} is not installed")


def _study(kind: Kind, minimize: Sequence[bool], seed: int) -> optuna.Study:
    import warnings

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
        directions: list[Any] = ["minimize" if one else "maximize" for one in minimize]
        return optuna.create_study(directions=directions, sampler=samplers[kind]())


def _told(tried: Tried, space: Sequence[Parameter], generation: int) -> optuna.trial.FrozenTrial:
    """A trial in Optuna's words; one that ended badly is one that was pruned at once, which is the worst there is.

    Args:
        generation: of NSGA-II, which draws at random as long as no trial has one.
    """
    from optuna.trial import TrialState, create_trial

    known = [one for one in space if one.key in tried.chosen]
    state = TrialState.COMPLETE if tried.values else TrialState.PRUNED if tried.ended else TrialState.RUNNING
    return create_trial(
        state=state,
        values=list(tried.values) or None,
        params={one.key: _value(one, tried.chosen[one.key]) for one in known},
        distributions={one.key: _distribution(one) for one in known},
        intermediate_values=dict(tried.rungs),
        system_attrs={"NSGAIISampler:generation": generation},
    )


def _value(one: Parameter, text: str) -> Any:
    if one.values:
        return text
    number = min(max(float(text), one.low), one.high)  # the text's few digits may round it out of the range
    return int(number) if one.whole else number


def _distribution(one: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.values:
        return CategoricalDistribution(one.values)
    if one.whole:
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(one.low, one.high, log=one.log)


def _asked(trial: optuna.Trial, one: Parameter) -> str:
    if one.values:
        return str(trial.suggest_categorical(one.key, one.values))
    if one.whole:
        return str(trial.suggest_int(one.key, int(one.low), int(one.high), log=one.log))
    return one.text(trial.suggest_float(one.key, one.low, one.high, log=one.log))
