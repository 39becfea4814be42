"""Keys and metrics of direct preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.preference_metrics import MARGIN, PAIR_LOSS, PREFERENCE
from mgpu_pipe.objectives.text_config import ReferencedConfig


@dataclass
class DPOConfig(ReferencedConfig):
    name: str = "dpo"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid is the loss of DPO (arXiv:2305.18290), ipo that of arXiv:2310.12036, of means over an answer's tokens."""
    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "below": 0.5})
    """Share of the pairs that are taken to be the wrong way round, below 0.5 (loss=sigmoid)."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        smoothing = self.label_smoothing
        if smoothing and self.loss != "sigmoid":
            reason = f"objective.loss={self.loss} has none"
            return [ConfigError("objective.label_smoothing", smoothing, "use 0, or objective.loss=sigmoid", reason)]
        return []


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right pairs, both rewards, both probabilities, now and under the reference, and
    the number of pairs."""
    loss, right, chosen, rejected, *said = (value / sums[-1] for value in sums[:-1])
    exact, exact_before = said[0] + said[1], said[2] + said[3]
    return {
        "val/loss": loss,
        "val/preference_accuracy": right,
        "val/style_rate": said[0] / exact if exact else 0.0,
        "val/exact_match": exact,
        "val/reference_style_rate": said[2] / exact_before if exact_before else 0.0,
        "val/reference_exact_match": exact_before,
        "val/margin": chosen - rejected,
        "val/chosen_reward": chosen,
        "val/rejected_reward": rejected,
    }


DESCRIPTION = Description(
    name="dpo",
    keys=DPOConfig,
    metrics=(
        PAIR_LOSS,
        PREFERENCE,
        Metric("val/style_rate", "held-out style rate", "of the pair's two", percent=True, higher_is_better=True),
        Metric("val/exact_match", "held-out exact match", percent=True, higher_is_better=True),
        Metric("val/reference_style_rate", "reference's style rate", "of the pair's two", percent=True),
        Metric("val/reference_exact_match", "reference's exact match", percent=True),
        MARGIN,
        Metric("val/chosen_reward", "held-out reward, chosen", higher_is_better=True),
        Metric("val/rejected_reward", "held-out reward, rejected"),
    ),
    measured=measured,
    counts="pairs",
    samples="preferences",
)
