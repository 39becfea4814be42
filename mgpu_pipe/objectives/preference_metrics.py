"""Metrics of preferences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.objectives.text_config import SampledTextConfig

PAIR_LOSS = Metric("val/loss", "held-out loss", "nats a pair")
PREFERENCE = Metric(
    "val/preference_accuracy", "held-out preference", "of pairs", percent=True, higher_is_better=True, headline=True
)
MARGIN = Metric("val/margin", "held-out margin", "of rewards", higher_is_better=True)
CHOSEN_LOSS = Metric("val/chosen_loss", "held-out loss, chosen answers", "nats a token")


def describe(name: str, keys: type[SampledTextConfig], figure: Metric) -> Description:
    """Describes an objective without a reference model.

    Args:
        figure: metric of the figure of ``ReferenceFreePairs.pair_values``.
    """
    return Description(
        name=name,
        keys=keys,
        metrics=(PAIR_LOSS, PREFERENCE, CHOSEN_LOSS, figure),
        measured=partial(measured, figure=figure.key),
        counts="pairs",
        samples="preferences",
    )


def measured(sums: Sequence[float], figure: str) -> dict[str, float]:
    """Metrics from the sums of losses, right pairs, chosen answers' mean losses, figures, and the pairs.

    Args:
        figure: name of the figure of ``ReferenceFreePairs.pair_values``.
    """
    loss, right, chosen, mean = (value / sums[-1] for value in sums[:-1])
    return {"val/loss": loss, "val/preference_accuracy": right, "val/chosen_loss": chosen, figure: mean}
