"""Keys and metrics of preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.text_keys import OneOutputConfig, ReferencedConfig, SampledTextConfig

PAIR_LOSS = Metric("val/loss", "held-out loss", "nats a pair")
PREFERENCE = Metric(
    "val/preference_accuracy", "held-out preference", "of pairs", percent=True, higher_is_better=True, headline=True
)
MARGIN = Metric("val/margin", "held-out margin", "of rewards", higher_is_better=True)
REJECTED = Metric("val/rejected_reward", "held-out reward, rejected")
CHOSEN_LOSS = Metric("val/chosen_loss", "held-out loss, chosen answers", "nats a token")


def measure_rewards(chosen: float, rejected: float) -> dict[str, float]:
    """Metrics from the mean rewards of chosen and of rejected answers."""
    return {"val/margin": chosen - rejected, "val/chosen_reward": chosen, "val/rejected_reward": rejected}


def describe_pairs(name: str, keys: type[SampledTextConfig], figure: Metric) -> Description:
    """Describes an objective without a reference model.

    Args:
        figure: metric of the figure of ``ReferenceFreePairs.pair_values``.
    """
    return Description(
        name=name,
        keys=keys,
        metrics=(PAIR_LOSS, PREFERENCE, CHOSEN_LOSS, figure),
        measured=partial(measure_pairs, figure=figure.key),
        counts="pairs",
        samples="preferences",
    )


def measure_pairs(sums: Sequence[float], figure: str) -> dict[str, float]:
    """Metrics from losses, right pairs, chosen answers' mean losses, ``figure`` (``pair_values``), and the pairs."""
    loss, right, chosen, mean = (value / sums[-1] for value in sums[:-1])
    return {"val/loss": loss, "val/preference_accuracy": right, "val/chosen_loss": chosen, figure: mean}


@dataclass
class CPOConfig(SampledTextConfig):
    name: str = "cpo"
    beta: float = field(default=0.1, metadata={"above": 0})
    """Factor of the answers' log-probabilities, which are the rewards."""
    chosen_weight: float = field(default=1.0, metadata={"at_least": 0})
    """Weight of the chosen answer's cross-entropy, a mean over its tokens (TRL's cpo_alpha)."""
    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "below": 0.5})
    """Share of the pairs that are taken to be the wrong way round, below 0.5."""


CPO = describe_pairs("cpo", CPOConfig, Metric("val/margin", "held-out margin", higher_is_better=True))


@dataclass
class ORPOConfig(SampledTextConfig):
    name: str = "orpo"
    odds_weight: float = field(default=0.1, metadata={"above": 0})
    """Weight of the odds ratio's loss next to the chosen answer's cross-entropy (lambda of arXiv:2403.07691)."""


ORPO = describe_pairs(
    "orpo", ORPOConfig, Metric("val/log_odds_ratio", "held-out log odds ratio", higher_is_better=True)
)


@dataclass
class SimPOConfig(SampledTextConfig):
    name: str = "simpo"
    beta: float = field(default=2.0, metadata={"above": 0})
    """Factor of the answers' mean log-probabilities, which are the rewards."""
    margin: float = field(default=1.0, metadata={"at_least": 0})
    """By how much the chosen answer's reward is to exceed the rejected one's (gamma of arXiv:2405.14734)."""


SIMPO = describe_pairs("simpo", SimPOConfig, Metric("val/margin", "held-out margin", higher_is_better=True))


@dataclass
class DPOConfig(ReferencedConfig):
    name: str = "dpo"
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


def measure_dpo(sums: Sequence[float]) -> dict[str, float]:
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
        **measure_rewards(chosen, rejected),
    }


DPO = Description(
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
        REJECTED,
    ),
    measured=measure_dpo,
    counts="pairs",
    samples="preferences",
)


@dataclass
class KTOConfig(ReferencedConfig):
    name: str = "kto"
    desirable_weight: float = field(default=1.0, metadata={"at_least": 0})
    """Weight of the losses of desirable answers; raise it where these are fewer."""
    undesirable_weight: float = field(default=1.0, metadata={"at_least": 0})
    """Weight of the losses of undesirable answers; raise it where these are fewer."""


def measure_kto(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right answers, rewards of desirable answers, their number, rewards of
    undesirable answers, reference points, and the number of answers."""
    loss, right, desirable, count, undesirable, points, total = sums
    good = desirable / count if count else 0.0
    bad = undesirable / (total - count) if total > count else 0.0
    return {
        "val/loss": loss / total,
        "val/accuracy": right / total,
        "val/margin": good - bad,
        "val/desirable_reward": good,
        "val/undesirable_reward": bad,
        "val/reference_point": points / total,
    }


KTO = Description(
    name="kto",
    keys=KTOConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "an answer"),
        Metric("val/accuracy", "held-out accuracy", "of answers", percent=True, higher_is_better=True, headline=True),
        MARGIN,
        Metric("val/desirable_reward", "held-out reward, desirable", higher_is_better=True),
        Metric("val/undesirable_reward", "held-out reward, undesirable"),
        Metric("val/reference_point", "held-out reference point", "nats"),
    ),
    measured=measure_kto,
    counts="answers",
    samples="unpaired",
)


@dataclass
class RewardConfig(OneOutputConfig):
    name: str = "reward"
    center_weight: float = field(default=0.0, metadata={"at_least": 0})
    """Weight of the square of a pair's summed rewards, which keeps the rewards around 0 (arXiv:2312.09244)."""


def measure_reward(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right pairs, both rewards, and the number of pairs."""
    loss, right, chosen, rejected = (value / sums[-1] for value in sums[:-1])
    return {"val/loss": loss, "val/accuracy": right, **measure_rewards(chosen, rejected)}


REWARD = Description(
    name="reward",
    keys=RewardConfig,
    metrics=(
        PAIR_LOSS,
        Metric("val/accuracy", "held-out accuracy", "of pairs", percent=True, higher_is_better=True, headline=True),
        MARGIN,
        Metric("val/chosen_reward", "held-out reward, chosen"),
        REJECTED,
    ),
    measured=measure_reward,
    counts="pairs",
    model_class="AutoModelForSequenceClassification",
    attention="own",
    samples="preferences",
    reads_margins=True,
    refused_axes=("pp", "cp"),
)
