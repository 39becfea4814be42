"""The keys of the optimizer, of parameters that it treats apart, and of the learning rate over the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class ParameterGroup:
    """Parameters that are trained otherwise than the rest."""

    parameters: list[str] = field(default_factory=list)
    """Patterns of parameter names (*, ?, [...]), such as model.embed_tokens.*, or parts of the model (vision, audio,
    projector, language); a parameter belongs to the first group that names it."""
    lr: float | None = field(default=None, metadata={"above": 0})
    """Peak learning rate; null is the optimizer's."""
    weight_decay: float | None = field(default=None, metadata={"at_least": 0})
    """In the place of optimizer.weight_decay; null is the optimizer's."""
    frozen_until: int = field(default=0, metadata={"at_least": 0})
    """Steps in which they stay as they are, their learning rate being 0; gradients are computed all the same."""


@dataclass
class WeightAverageConfig:
    decay: float | None = field(default=None, metadata={"above": 0, "below": 1, "or": ", or null to keep none"})
    """After each step the average is this times itself and the rest of the new weights; null keeps none."""
    evaluate: bool = False
    """Evaluation in training, tasks and keep_best's ranking included, is of the average; meanwhile the weights are held
    once more."""


@dataclass
class SpikeGuardConfig:
    factor: float | None = field(default=None, metadata={"at_least": 1, "or": ", or null to take every step"})
    """A gradient norm of more than this times the median of the steps before is a spike; null takes every step."""
    window: int = field(default=100, metadata={"at_least": 2, "at_most": 10000})
    """Steps that the median is of; until there are so many, nothing is a spike."""
    action: Literal["skip", "stop"] = "skip"
    """At a spike: leave the weights as they are and go on with the next step, or save and end the run as failed."""


@dataclass
class OptimizerConfig:
    _target_: str = "torch.optim.AdamW"
    """Any subclass of torch.optim.Optimizer."""
    lr: float = field(default=3e-4, metadata={"above": 0})
    """Peak learning rate."""
    weight_decay: float = field(default=0.1, metadata={"at_least": 0})
    """Weight decay of matrices and embeddings."""
    decay_norms_and_biases: bool = False
    """Apply the weight decay to norms and biases too."""
    layer_decay: float = field(default=1.0, metadata={"above": 0, "at_most": 1})
    """Each block's learning rate is that of the block above it times this; embeddings lie below the first block, all
    else is at the top (arXiv:2003.10555). Not of groups with a rate of their own."""
    groups: dict[str, ParameterGroup] = field(default_factory=dict)
    """Parameters with a learning rate, weight decay or start of their own, by a name of your choice."""
    ema: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    """A moving average of the weights, kept and saved beside them; --weights ema of eval, export, generate and chat
    takes it."""
    spike_guard: SpikeGuardConfig = field(default_factory=SpikeGuardConfig)
    """What is done at a step whose gradient norm stands out."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer (betas, eps, momentum, ...)."""


@dataclass
class SchedulerConfig:
    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """constant, linear, cosine, or wsd (warm-up, stable, decay); each after the warm-up."""
    warmup_steps: int = field(default=0, metadata={"at_least": 0})
    """Optimizer steps of linear warm-up from 0."""
    warmup_ratio: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1.0})
    """The same as a share of total_steps, rounded up; in the place of warmup_steps."""
    decay_steps: int | None = field(default=None, metadata={"at_least": 1})
    """wsd: optimizer steps of the final linear decay; null is a tenth of total_steps."""
    min_lr_ratio: float = field(default=0.1, metadata={"at_least": 0, "at_most": 1.0})
    """Final learning rate as a share of the peak."""
    total_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Horizon in optimizer steps; null is the first launch's trainer.max_steps, which a resume keeps."""

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up of a run of that horizon."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * total_steps)
