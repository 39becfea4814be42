"""Keys and metrics of sequence-to-sequence learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import Self

from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import Auto, ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError


@dataclass
class Seq2SeqConfig(ObjectiveConfig):
    name: str = "seq2seq"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    loss_chunk_tokens: int | Auto = field(default="auto", metadata={**FREE, "at_least": 0})
    """Tokens whose logits exist at once in the loss; auto bounds them to 64 MiB (GPUs: 256); 0 computes them whole."""
    sample_prompts: list[str] = field(default_factory=list, metadata=FREE)
    """Sources that are answered after training and shown with the result, the likeliest token at a time."""
    sample_max_new_tokens: int = field(default=64, metadata={**FREE, "at_least": 1})
    """Most tokens of such an answer."""

    def shrunk(self, tokens: int) -> Self:
        chunk = 0 if self.loss_chunk_tokens == 0 else max(1, tokens * 2 // 5)
        return replace(self, sample_prompts=[], loss_chunk_tokens=chunk)

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_prompts, self.sample_max_new_tokens

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
