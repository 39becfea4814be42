"""Keys and metrics of sound classification."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.class_metrics import CLASS_METRICS, measure_classes
from mgpu_pipe.objectives.wave_encoders import FAMILIES as WAVE_FAMILIES
from mgpu_pipe.objectives.wave_encoders import WaveEncoderConfig

FAMILIES = ("audio-spectrogram-transformer", *WAVE_FAMILIES, "whisper")
"""Tested families."""


@dataclass
class SoundClassificationConfig(WaveEncoderConfig):
    name: str = "sound_classification"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the label that is spread evenly over all classes while training (Szegedy et al. 2015)."""

    def adapter_errors(self, config: RunConfig) -> list[ConfigError]:
        return new_head_errors(config)


def new_head_errors(config: RunConfig) -> list[ConfigError]:
    """Error of adapters beside a classifier that nothing trains."""
    if config.peft.train_also:
        return []
    fix = "name the head's parameters, such as [projector.*,classifier.*] ([classifier.*] of AST)"
    return [ConfigError("peft.train_also", [], fix, "the new head of a classifier would stay untrained")]


DESCRIPTION = Description(
    name="sound_classification",
    keys=SoundClassificationConfig,
    metrics=CLASS_METRICS,
    measured=measure_classes,
    counts="samples",
    model_class="AutoModelForAudioClassification",
    attention="own",
    samples="labelled_sounds",
    families=FAMILIES,
    refused_axes=("pp", "cp", "ep"),
    other_names=("audio_classification",),
)
