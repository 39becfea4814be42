"""Keys and metrics of sound tagging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.sound_classification_keys import FAMILIES, new_head_errors
from mgpu_pipe.objectives.wave_encoders import WaveEncoderConfig


@dataclass
class SoundTaggingConfig(WaveEncoderConfig):
    name: str = "sound_tagging"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    def adapter_errors(self, config: RunConfig) -> list[ConfigError]:
        return new_head_errors(config)

    def model_fields(self) -> Mapping[str, Any]:
        return {"problem_type": "multi_label_classification"}


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, recordings whose classes are all right, classes of recordings, right and
    predicted ones, and the number of recordings; further sums between are of single classes."""
    loss, exact, classes, right, predicted = sums[:5]
    f1 = 2 * right / max(classes + predicted, 1)
    return {"val/loss": loss / sums[-1], "val/f1": f1, "val/exact_match": exact / sums[-1]}


DESCRIPTION = Description(
    name="sound_tagging",
    keys=SoundTaggingConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a class"),
        Metric("val/f1", "held-out F1", percent=True, higher_is_better=True, headline=True),
        Metric("val/exact_match", "held-out exact matches", percent=True, higher_is_better=True),
    ),
    measured=measured,
    counts="samples",
    model_class="AutoModelForAudioClassification",
    attention="own",
    samples="tagged_sounds",
    families=FAMILIES,
    refused_axes=("pp", "cp", "ep"),
    other_names=("audio_tagging", "multi_label"),
)
