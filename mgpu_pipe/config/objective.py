"""What code without torch knows of an objective: its keys, its metrics, and the kind of model that it trains.

Beside each objective lies a module ``<name>_keys`` with its :data:`DESCRIPTION`, which imports no torch. An installed
package names its description in the entry point group ``mgpu_pipe.objective_keys``, under its objective's name; one
that names none has the keys and metrics of causal language modelling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from mgpu_pipe.config import plugins
from mgpu_pipe.errors import ConfigError

TRAINING_METRICS = ("train/loss", "train/grad_norm", "lr")
"""What every step's row has."""


@dataclass(frozen=True)
class Metric:
    """What an evaluation measures.

    Attributes:
        key: in metrics files and summaries.
        title: in tables and reports.
        unit: behind the value.
        short: its title where there is little room.
        digits: behind the point in ``mgpu-pipe eval``.
        percent: a share, shown as a percentage.
        higher_is_better: as of an accuracy.
        headline: the one that a run is told by.
        baseline: the entry of the data's figures that it is compared with.
        of_loss: gives it from the held-out loss, where a run did not record it.
    """

    key: str
    title: str
    unit: str = ""
    short: str = ""
    digits: int = 6
    percent: bool = False
    higher_is_better: bool = False
    headline: bool = False
    baseline: str | None = None
    of_loss: Callable[[float], float] | None = None

    @property
    def name(self) -> str:
        """The key without its section."""
        return self.key.partition("/")[2]


@dataclass(frozen=True)
class Description:
    """An objective without its mathematics.

    Attributes:
        name: ``objective.name``.
        keys: the dataclass of ``objective.*``, a subclass of ``ObjectiveConfig``.
        metrics: what its evaluation measures; the held-out loss, ``val/loss``, first.
        measured: from the sums over the held-out samples (of losses, of what ``evaluation_sums`` gives besides, and the
            loss denominator) to the metrics by key.
        counts: what the loss denominator counts.
        model_class: transformers' class that builds its models.
        samples: the kind of data that it trains on; a package may bring its own kind instead.
        families: those whose models it trains; empty for all that the other checks let pass.
        attention: how tokens see one another: causal, in both directions, an encoder's and a decoder's, or as the
            model's own code has it.
        refused_axes: of ``strategy``, those that the objective cannot be spread over.
    """

    name: str
    keys: type[Any]
    metrics: tuple[Metric, ...]
    measured: Callable[[Sequence[float]], Mapping[str, float]]
    counts: str = "tokens"
    model_class: str = "AutoModelForCausalLM"
    samples: str = "packed_text"
    families: tuple[str, ...] = ()
    attention: Literal["causal", "bidirectional", "encoder_decoder", "own"] = "causal"
    refused_axes: tuple[str, ...] = ()

    @property
    def headline(self) -> Metric:
        return next((metric for metric in self.metrics if metric.headline), self.metrics[0])

    def metric(self, key: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.key == key), None)

    @property
    def ranked(self) -> tuple[str, ...]:
        """The metrics that a step's checkpoint keeps, for ``checkpoint.keep_best``."""
        return (*TRAINING_METRICS, *(metric.key for metric in self.metrics))


@functools.lru_cache(maxsize=None)
def description(name: str) -> Description:
    """Of the objective of that name; of an unknown one that of causal language modelling.

    Raises:
        ConfigError: what a package registers is no description, or cannot be imported.
    """
    group = plugins.OBJECTIVE_KEYS_GROUP
    if name not in plugins.OBJECTIVES and name in plugins.registered(group):
        loaded = plugins.load("objective.name", name, group)
        if not isinstance(loaded, Description):
            fix = f"register a {Description.__module__}.Description in {group}"
            raise ConfigError("objective.name", name, fix, f"what is registered there is a {type(loaded).__name__}")
        return loaded
    built_in = name if name in plugins.OBJECTIVES else plugins.OBJECTIVES[0]
    result: Description = import_module(f"mgpu_pipe.objectives.{built_in}_keys").DESCRIPTION
    return result


def descriptions() -> list[Description]:
    """Of this project's objectives and of those that installed packages describe."""
    return [description(name) for name in (*plugins.OBJECTIVES, *plugins.registered(plugins.OBJECTIVE_KEYS_GROUP))]
