"""What the program knows of the focal loss without torch: its two keys and its metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import ObjectiveConfig


@dataclass
class FocalLossConfig(ObjectiveConfig):
    name: str = "focal_loss"
    """The objective."""
    gamma: float = field(default=2.0, metadata={"at_least": 0})
    """How much less a token counts that the model is sure of; 0 is cross-entropy."""
    weight: float = field(default=1.0, metadata={"at_least": 0})
    """Multiplies the loss."""


def measured(sums: Sequence[float]) -> dict[str, float]:
    """From the sums of losses and of right tokens, and the number of tokens."""
    return {"val/loss": sums[0] / sums[-1], "val/token_accuracy": sums[1] / sums[-1]}


DESCRIPTION = Description(
    name="focal_loss",
    keys=FocalLossConfig,
    metrics=(
        Metric("val/loss", "held-out focal loss"),
        Metric("val/token_accuracy", "token accuracy", short="acc", percent=True, higher_is_better=True, headline=True),
    ),
    measured=measured,
)
