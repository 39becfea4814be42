"""Keys and metrics of Kahneman-Tversky optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.objectives.preference_metrics import MARGIN
from mgpu_pipe.objectives.text_config import ReferencedConfig


@dataclass
class KTOConfig(ReferencedConfig):
    name: str = "kto"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    desirable_weight: float = field(default=1.0, metadata={"at_least": 0})
    """Weight of the losses of desirable answers; raise it where these are fewer."""
    undesirable_weight: float = field(default=1.0, metadata={"at_least": 0})
    """Weight of the losses of undesirable answers; raise it where these are fewer."""


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right answers, rewards of desirable answers, their number, rewards of
    undesirable answers, reference points, and the number of answers."""
    loss, right, desirable, count, undesirable, points, total = sums
    good = desirable / count if count else 0.0
    bad = undesirable / (total - count) if total > count else 0.0
    return {
        "val/loss": loss / total,
        "val/accuracy": right / total,
        "val/margin": good - bad,
        "val/desirable_reward": good,
        "val/undesirable_reward": bad,
        "val/reference_point": points / total,
    }


DESCRIPTION = Description(
    name="kto",
    keys=KTOConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "an answer"),
        Metric("val/accuracy", "held-out accuracy", "of answers", percent=True, higher_is_better=True, headline=True),
        MARGIN,
        Metric("val/desirable_reward", "held-out reward, desirable", higher_is_better=True),
        Metric("val/undesirable_reward", "held-out reward, undesirable"),
        Metric("val/reference_point", "held-out reference point", "nats"),
    ),
    measured=measured,
    counts="answers",
    samples="unpaired",
)
