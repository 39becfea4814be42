"""Metrics of preferences without a reference model."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.config.objective import Metric

PAIR_LOSS = Metric("val/loss", "held-out loss", "nats a pair")
PREFERENCE = Metric(
    "val/preference_accuracy", "held-out preference", "of pairs", percent=True, higher_is_better=True, headline=True
)
CHOSEN_LOSS = Metric("val/chosen_loss", "held-out loss, chosen answers", "nats a token")


def measured(sums: Sequence[float], figure: str) -> dict[str, float]:
    """Metrics from the sums of losses, right pairs, chosen answers' mean losses, figures, and the pairs.

    Args:
        figure: name of the figure of ``ReferenceFreePairs.pair_values``.
    """
    loss, right, chosen, mean = (value / sums[-1] for value in sums[:-1])
    return {"val/loss": loss, "val/preference_accuracy": right, "val/chosen_loss": chosen, figure: mean}
