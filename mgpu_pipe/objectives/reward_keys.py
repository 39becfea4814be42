"""Keys and metrics of reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.objectives.preference_metrics import MARGIN, PAIR_LOSS
from mgpu_pipe.objectives.text_config import OneOutputConfig


@dataclass
class RewardConfig(OneOutputConfig):
    name: str = "reward"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    center_weight: float = field(default=0.0, metadata={"at_least": 0})
    """Weight of the square of a pair's summed rewards, which holds the rewards around 0 (arXiv:2312.09244)."""


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right pairs, both rewards, and the number of pairs."""
    loss, right, chosen, rejected = (value / sums[-1] for value in sums[:-1])
    return {
        "val/loss": loss,
        "val/accuracy": right,
        "val/margin": chosen - rejected,
        "val/chosen_reward": chosen,
        "val/rejected_reward": rejected,
    }


DESCRIPTION = Description(
    name="reward",
    keys=RewardConfig,
    metrics=(
        PAIR_LOSS,
        Metric("val/accuracy", "held-out accuracy", "of pairs", percent=True, higher_is_better=True, headline=True),
        MARGIN,
        Metric("val/chosen_reward", "held-out reward, chosen"),
        Metric("val/rejected_reward", "held-out reward, rejected"),
    ),
    measured=measured,
    counts="pairs",
    model_class="AutoModelForSequenceClassification",
    attention="own",
    samples="preferences",
    reads_margins=True,
    refused_axes=("pp", "cp"),
)
