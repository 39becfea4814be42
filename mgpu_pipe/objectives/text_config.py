"""Keys that objectives over tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from typing_extensions import Self

from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.schema import Auto, ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import model_types
from mgpu_pipe.topology import ParallelDims

UNFIT = (
    *("canine", "flaubert", "fnet", "funnel", "layoutlmv2", "layoutlmv3", "lilt", "perceiver", "reformer"),
    *("xlm", "xlnet"),
)
"""Families whose classifiers mix in padding, or read more than tokens."""


@dataclass
class TokenLossConfig(ObjectiveConfig):
    """Keys of objectives whose loss walks over a vocabulary."""

    loss_chunk_tokens: int | Auto = field(default="auto", metadata={**FREE, "at_least": 0})
    """Tokens whose logits exist at once in the loss; auto bounds them to 64 MiB (GPUs: 256); 0 computes them whole."""

    def shrunk(self, tokens: int) -> Self:
        chunk = 0 if self.loss_chunk_tokens == 0 else max(1, tokens * 2 // 5)
        return replace(self, loss_chunk_tokens=chunk)


@dataclass
class SampledTextConfig(TokenLossConfig):
    """Keys of objectives whose model writes texts."""

    sample_prompts: list[str] = field(default_factory=list, metadata=FREE)
    """Prompts that are continued or answered after training and shown with the result."""
    sample_max_new_tokens: int = field(default=64, metadata={**FREE, "at_least": 1})
    """Tokens of a continuation or answer, at most."""

    def shrunk(self, tokens: int) -> Self:
        return replace(super().shrunk(tokens), sample_prompts=[])

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_prompts, self.sample_max_new_tokens


@dataclass
class ReferencedConfig(SampledTextConfig):
    """Keys of objectives over answers that a reference model holds."""

    beta: float = field(default=0.1, metadata={"above": 0})
    """How strongly the model is held to its reference: the larger, the closer it stays."""
    reference: Literal["cached", "live"] = "cached"
    """cached takes the reference's log-probabilities once, before the first step; live in every step from the model
    without its adapters (peft=lora), a forward pass more."""

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        if self.reference == "cached":
            return []
        fix, key = "use objective.reference=cached", "objective.reference"
        peft = config.peft
        if peft.name == "none" or peft.train_also or peft.init_from:
            reason = "it is the model without its adapters, which must be all that is trained, and begin at nothing"
            return [ConfigError(key, "live", f"{fix}, or peft=lora without train_also and init_from", reason)]
        with suppress(ConfigError):  # another check refuses sizes that do not fit
            if ParallelDims.from_config(config.trainer, config.strategy).pp > 1:
                return [ConfigError(key, "live", fix, "a pipeline's step has one forward pass")]
        return []


@dataclass
class TextHeadConfig(ObjectiveConfig):
    """Keys of objectives whose model ends in the head of a sequence classifier."""

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


@dataclass
class OneOutputConfig(TextHeadConfig):
    """Keys of objectives whose head has one output."""

    def model_fields(self) -> Mapping[str, Any]:
        return {"num_labels": 1}

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        classes = fields.get("num_labels", 1)
        if classes != 1:
            reason = f"the head of objective={self.name} has one output"
            return [ConfigError("model.config.num_labels", classes, "leave it out", reason)]
        return super().model_errors(fields)
