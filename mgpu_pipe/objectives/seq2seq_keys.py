"""Keys and metrics of sequence-to-sequence learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.text_config import SampledTextConfig


@dataclass
class Seq2SeqConfig(SampledTextConfig):
    name: str = "seq2seq"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    def adapter_errors(self, config: RunConfig) -> list[ConfigError]:
        if config.peft.name != "qlora":
            return []
        return [ConfigError("peft", "qlora", "use peft=lora", "T5 looks at the type of its weights")]


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right tokens, right answers, answers, and the number of tokens."""
    loss, right_tokens, right_answers, answers, tokens = sums
    return {
        "val/loss": loss / tokens,
        "val/accuracy": right_tokens / tokens,
        "val/exact_match": right_answers / answers,
    }


DESCRIPTION = Description(
    name="seq2seq",
    keys=Seq2SeqConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a token"),
        Metric("val/accuracy", "held-out accuracy", "of tokens", percent=True, higher_is_better=True),
        Metric("val/exact_match", "held-out exact match", percent=True, higher_is_better=True, headline=True),
    ),
    measured=measured,
    counts="target tokens",
    samples="pairs",
    model_class="AutoModelForSeq2SeqLM",
    attention="encoder_decoder",
    families=("t5",),
    other_names=("summarization", "translation"),
)
