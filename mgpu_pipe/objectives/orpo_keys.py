"""Keys and metrics of odds ratio preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Metric
from mgpu_pipe.objectives.preference_metrics import describe
from mgpu_pipe.objectives.text_config import SampledTextConfig


@dataclass
class ORPOConfig(SampledTextConfig):
    name: str = "orpo"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    odds_weight: float = field(default=0.1, metadata={"above": 0})
    """Weight of the odds ratio's loss next to the chosen answer's cross-entropy (lambda of arXiv:2403.07691)."""


DESCRIPTION = describe(
    "orpo", ORPOConfig, Metric("val/log_odds_ratio", "held-out log odds ratio", higher_is_better=True)
)
