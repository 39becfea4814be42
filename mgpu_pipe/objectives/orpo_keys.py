"""Keys and metrics of odds ratio preference optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import Self

from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import Auto, ObjectiveConfig


@dataclass
class ORPOConfig(ObjectiveConfig):
    name: str = "orpo"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    odds_weight: float = field(default=0.1, metadata={"above": 0})
    """Weight of the odds ratio's loss next to the chosen answer's cross-entropy (lambda of arXiv:2403.07691)."""
    loss_chunk_tokens: int | Auto = field(default="auto", metadata={**FREE, "at_least": 0})
    """Tokens whose logits exist at once in the loss; auto bounds them to 64 MiB (GPUs: 256); 0 computes them whole."""
    sample_prompts: list[str] = field(default_factory=list, metadata=FREE)
    """Questions that are answered after training and shown with the result."""
    sample_max_new_tokens: int = field(default=64, metadata={**FREE, "at_least": 1})
    """Most tokens of such an answer."""

    def shrunk(self, tokens: int) -> Self:
        chunk = 0 if self.loss_chunk_tokens == 0 else max(1, tokens * 2 // 5)
        return replace(self, sample_prompts=[], loss_chunk_tokens=chunk)

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_prompts, self.sample_max_new_tokens


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right pairs, chosen answers' mean losses, log odds ratios, and the pairs."""
    loss, right, chosen, ratio = (value / sums[-1] for value in sums[:-1])
    return {"val/loss": loss, "val/preference_accuracy": right, "val/chosen_loss": chosen, "val/log_odds_ratio": ratio}


DESCRIPTION = Description(
    name="orpo",
    keys=ORPOConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a pair"),
        Metric(
            "val/preference_accuracy",
            "held-out preference",
            "of pairs",
            percent=True,
            higher_is_better=True,
            headline=True,
        ),
        Metric("val/chosen_loss", "held-out loss, chosen answers", "nats a token"),
        Metric("val/log_odds_ratio", "held-out log odds ratio", higher_is_better=True),
    ),
    measured=measured,
    counts="pairs",
    samples="preferences",
)
