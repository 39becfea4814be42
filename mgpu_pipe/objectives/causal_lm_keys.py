"""Keys and metrics of causal language modelling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import Self

from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import Auto, ObjectiveConfig

HIGHEST_EXPONENT = 700.0
"""Largest exponent of a recorded perplexity, which JSON needs finite."""


@dataclass
class CausalLMConfig(ObjectiveConfig):
    name: str = "causal_lm"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    loss_chunk_tokens: int | Auto = field(default="auto", metadata={**FREE, "at_least": 0})
    """Tokens whose logits exist at once in the loss; auto bounds them to 64 MiB (GPUs: 256); 0 computes them whole."""
    router_aux_loss: float = field(default=0.0, metadata={"at_least": 0})
    """Coefficient of the routers' balance loss (mixtures of experts), per sequence; not part of train/loss."""
    sample_prompts: list[str] = field(default_factory=list, metadata=FREE)
    """Prompts continued after training and shown with the result."""
    sample_max_new_tokens: int = field(default=64, metadata={**FREE, "at_least": 1})
    """Tokens a sample continues for."""

    def shrunk(self, tokens: int) -> Self:
        chunk = 0 if self.loss_chunk_tokens == 0 else max(1, tokens * 2 // 5)
        return replace(self, sample_prompts=[], loss_chunk_tokens=chunk)

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_prompts, self.sample_max_new_tokens


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
