"""Keys and metrics of contrastive preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Metric
from mgpu_pipe.objectives.preference_metrics import describe
from mgpu_pipe.objectives.text_config import SampledTextConfig


@dataclass
class CPOConfig(SampledTextConfig):
    name: str = "cpo"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    beta: float = field(default=0.1, metadata={"above": 0})
    """Factor of the answers' log-probabilities, which are the rewards."""
    chosen_weight: float = field(default=1.0, metadata={"at_least": 0})
    """Weight of the chosen answer's cross-entropy, a mean over its tokens (TRL's cpo_alpha)."""
    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "below": 0.5})
    """Share of the pairs that are taken to be the wrong way round, below 0.5."""


DESCRIPTION = describe("cpo", CPOConfig, Metric("val/margin", "held-out margin", higher_is_better=True))
