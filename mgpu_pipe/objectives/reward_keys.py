"""Keys and metrics of reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.preference_metrics import MARGIN, PAIR_LOSS
from mgpu_pipe.objectives.text_config import TextHeadConfig


@dataclass
class RewardConfig(TextHeadConfig):
    name: str = "reward"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    center_weight: float = field(default=0.0, metadata={"at_least": 0})
    """Weight of the square of a pair's summed rewards, which holds the rewards around 0 (arXiv:2312.09244)."""

    def model_fields(self) -> Mapping[str, Any]:
        return {"num_labels": 1}

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        classes = fields.get("num_labels", 1)
        if classes != 1:
            reason = "a reward model's head has one output"
            return [ConfigError("model.config.num_labels", classes, "leave it out", reason)]
        return super().model_errors(fields)


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
