"""Keys and metrics of sequence classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Self

from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import model_types

UNFIT = (
    *("canine", "flaubert", "fnet", "funnel", "layoutlmv2", "layoutlmv3", "lilt", "perceiver", "reformer"),
    *("xlm", "xlnet"),
)
"""Families whose classifiers mix in padding, or read more than tokens."""


@dataclass
class SequenceClassificationConfig(ObjectiveConfig):
    name: str = "sequence_classification"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    sample_texts: list[str] = field(default_factory=list, metadata=FREE)
    """Texts whose class is told after training and shown with the result."""

    def shrunk(self, tokens: int) -> Self:
        return replace(self, sample_texts=[])

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_texts, 0

    def adapter_errors(self, config: RunConfig) -> list[ConfigError]:
        if config.peft.train_also:
            return []
        fix = "name the head's parameters, such as [score.weight] or [classifier.*]"
        return [ConfigError("peft.train_also", [], fix, "the new head of a classifier would stay untrained")]

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        model_type = str(fields["model_type"])
        if model_type in UNFIT or fields.get("is_encoder_decoder"):
            reason = "a padded row of tokens is not what its classifier reads"
            return [ConfigError("model.type", model_type, "use an encoder (bert) or a causal model (llama)", reason)]
        if fields["model_type"] in model_types("AutoModelForMaskedLM") or fields.get("pad_token_id") is not None:
            return []
        reason = "it finds a row's last token by it: the last one that is another"
        fix = "give the id that fills rows up, e.g. the tokenizer's end-of-text token (0 in those made here)"
        return [ConfigError("model.config.pad_token_id", None, fix, reason)]


def measured(sums: Sequence[float]) -> dict[str, float]:
    return {"val/loss": sums[0] / sums[-1], "val/accuracy": sums[1] / sums[-1]}


DESCRIPTION = Description(
    name="sequence_classification",
    keys=SequenceClassificationConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a sample"),
        Metric("val/accuracy", "held-out accuracy", percent=True, higher_is_better=True, headline=True),
    ),
    measured=measured,
    counts="samples",
    model_class="AutoModelForSequenceClassification",
    attention="own",
    samples="labelled_text",
    refused_axes=("pp", "cp"),
    other_names=("classification",),
)
