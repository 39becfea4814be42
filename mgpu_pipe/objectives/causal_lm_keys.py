"""Keys and metrics of causal language modelling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.objectives.text_config import SampledTextConfig

HIGHEST_EXPONENT = 700.0
"""Largest exponent of a recorded perplexity, which JSON needs finite."""


@dataclass
class CausalLMConfig(SampledTextConfig):
    name: str = "causal_lm"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    router_aux_loss: float = field(default=0.0, metadata={"at_least": 0})
    """Coefficient of the routers' balance loss (mixtures of experts), per sequence; not part of train/loss."""


def exponential(loss: float) -> float:
    """``exp(loss)``, infinite where a float cannot hold it."""
    return math.exp(loss) if not loss > 709 else math.inf


def perplexity(sums: Sequence[float]) -> dict[str, float]:
    loss = sums[0] / sums[-1]
    return {"val/loss": loss, "val/perplexity": math.exp(min(loss, HIGHEST_EXPONENT))}


LOSS = Metric("val/loss", "held-out loss", "nats a token")
DESCRIPTION = Description(
    name="causal_lm",
    keys=CausalLMConfig,
    metrics=(
        LOSS,
        Metric(
            "val/perplexity",
            "held-out perplexity",
            short="ppl",
            digits=3,
            headline=True,
            baseline="unigram_perplexity",
            of_loss=exponential,
        ),
    ),
    measured=perplexity,
    other_names=("clm",),
)
