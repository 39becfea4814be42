"""Keys and metrics of simple preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Metric
from mgpu_pipe.objectives.preference_metrics import describe
from mgpu_pipe.objectives.text_config import SampledTextConfig


@dataclass
class SimPOConfig(SampledTextConfig):
    name: str = "simpo"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    beta: float = field(default=2.0, metadata={"above": 0})
    """Factor of the answers' mean log-probabilities, which are the rewards."""
    margin: float = field(default=1.0, metadata={"at_least": 0})
    """By how much the chosen answer's reward is to exceed the rejected one's (gamma of arXiv:2405.14734)."""


DESCRIPTION = describe("simpo", SimPOConfig, Metric("val/margin", "held-out margin", higher_is_better=True))
