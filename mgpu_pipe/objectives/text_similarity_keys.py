"""Keys and metrics of the similarity of sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.text_embedding_keys import FAMILIES, VectorConfig


@dataclass
class TextSimilarityConfig(VectorConfig):
    name: str = "text_similarity"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    loss: Literal["cosent", "cosine"] = "cosent"
    """cosent brings the pairs of the step into the order of their scores, of any range; cosine makes each pair's cosine
    its score, from -1 to 1, by the mean squared error."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        errors = super().model_errors(fields)
        if self.loss == "cosine" and not self.normalize:
            errors.append(ConfigError("objective.normalize", False, "use true, or objective.loss=cosent", "no cosines"))
        return errors


def measured(sums: Sequence[float]) -> dict[str, float]:
    loss, spearman, pearson, samples = sums
    return {"val/loss": loss / samples, "val/spearman": spearman, "val/pearson": pearson}


DESCRIPTION = Description(
    name="text_similarity",
    keys=TextSimilarityConfig,
    metrics=(
        Metric("val/loss", "held-out loss"),
        Metric("val/spearman", "Spearman correlation", higher_is_better=True, headline=True),
        Metric("val/pearson", "Pearson correlation", higher_is_better=True),
    ),
    measured=measured,
    counts="samples",
    model_class="AutoModel",
    attention="own",
    samples="scored_pairs",
    families=FAMILIES,
    refused_axes=("pp", "cp", "ep"),
    other_names=("cosent", "sts"),
)
