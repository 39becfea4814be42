"""Keys and metrics of connectionist temporal classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.alphabet import own_alphabet
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.transcripts import RATES, TranscriptConfig, error_rates
from mgpu_pipe.objectives.wave_encoders import FAMILIES, WaveEncoderConfig


@dataclass
class CTCConfig(WaveEncoderConfig, TranscriptConfig):
    name: str = "ctc"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    def adapter_errors(self, config: RunConfig) -> list[ConfigError]:
        if config.peft.train_also or own_alphabet(config.model) is not None:
            return []
        reason = "the head of a new alphabet would stay untrained"
        return [ConfigError("peft.train_also", [], "use peft.train_also=[lm_head.*]", reason)]


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, wrong words, words, wrong characters, characters, and the number of labels."""
    return {"val/loss": sums[0] / sums[-1], **error_rates(sums[1:-1])}


DESCRIPTION = Description(
    name="ctc",
    keys=CTCConfig,
    metrics=(Metric("val/loss", "held-out loss", "nats a character"), *RATES),
    measured=measured,
    counts="characters",
    model_class="AutoModelForCTC",
    attention="own",
    samples="speech",
    families=FAMILIES,
    refused_axes=("pp", "cp", "ep"),
    other_names=("asr",),
    alphabet=True,
)
