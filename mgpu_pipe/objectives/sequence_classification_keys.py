"""Keys and metrics of sequence classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import Self

from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.objectives.text_config import TextHeadConfig


@dataclass
class SequenceClassificationConfig(TextHeadConfig):
    name: str = "sequence_classification"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    sample_texts: list[str] = field(default_factory=list, metadata=FREE)
    """Texts whose class is told after training and shown with the result."""

    def shrunk(self, tokens: int) -> Self:
        return replace(self, sample_texts=[])

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_texts, 0


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
