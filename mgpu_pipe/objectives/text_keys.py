"""Keys and metrics of objectives over tokens: language modelling, and what the keys of several share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from mgpu_pipe.architectures.find import families_in_role, family_of
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import Auto, DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import existing_file, made_here, mask_token_id
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import model_types
from mgpu_pipe.topology import ParallelDims


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
    """Keys of objectives that compare answers with those of a reference model."""

    beta: float = field(default=0.1, metadata={"above": 0})
    """Strength of the pull to the reference: the larger, the closer the model stays."""
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


def untrained_head(peft: PeftConfig, parameters: str) -> list[ConfigError]:
    """Error of adapters next to a new classifier, whose ``parameters`` (examples) nothing trains."""
    if peft.train_also:
        return []
    fix = f"name the head's parameters, such as {parameters}"
    return [ConfigError("peft.train_also", [], fix, "the new head of a classifier would stay untrained")]


@dataclass
class TextHeadConfig(ObjectiveConfig):
    """Keys of objectives whose model ends in the head of a sequence classifier."""

    def adapter_errors(self, model: ModelConfig, peft: PeftConfig) -> list[ConfigError]:
        return untrained_head(peft, "[score.weight] or [classifier.*]")

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        model_type = str(fields["model_type"])
        if not family_of(model_type).classifies or fields.get("is_encoder_decoder"):
            reason = "a padded row of tokens is not what its classifier reads"
            return [ConfigError("model.type", model_type, "use an encoder (bert) or a causal model (llama)", reason)]
        padding = fields.get("pad_token_id")
        is_known = isinstance(padding, int) and padding >= 0
        if fields["model_type"] in model_types("AutoModelForMaskedLM") or is_known:
            return []
        reason = "it finds a row's last token by it: the last one that is another"
        fix = "give an id that fills rows up, e.g. that of the tokenizer's end-of-text token"
        return [ConfigError("model.config.pad_token_id", padding, fix, reason)]


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


HIGHEST_EXPONENT = 700.0
"""Largest exponent of a recorded perplexity, which JSON needs finite."""


@dataclass
class CausalLMConfig(SampledTextConfig):
    name: str = "causal_lm"
    router_aux_loss: float = field(default=0.0, metadata={"at_least": 0})
    """Coefficient of the routers' balance loss (mixtures of experts), per sequence; not part of train/loss."""


def exponential(loss: float) -> float:
    """``exp(loss)``, infinite where a float cannot hold it."""
    return math.exp(loss) if not loss > 709 else math.inf


def perplexity(sums: Sequence[float]) -> dict[str, float]:
    loss = sums[0] / sums[-1]
    return {"val/loss": loss, "val/perplexity": math.exp(min(loss, HIGHEST_EXPONENT))}


TOKEN_LOSS = Metric("val/loss", "held-out loss", "nats a token")
TOKEN_ACCURACY = Metric("val/accuracy", "held-out accuracy", "of tokens", percent=True, higher_is_better=True)
EXACT_MATCH = Metric("val/exact_match", "held-out exact match", percent=True, higher_is_better=True, headline=True)
CAUSAL_LM = Description(
    name="causal_lm",
    keys=CausalLMConfig,
    metrics=(
        TOKEN_LOSS,
        Metric(
            "val/perplexity",
            "held-out perplexity",
            short="ppl",
            digits=3,
            headline=True,
            baseline="unigram_perplexity",
            of_loss=exponential,
        ),
    ),
    measured=perplexity,
    other_names=("clm",),
)


@dataclass
class MaskedLMConfig(TokenLossConfig):
    name: str = "masked_lm"
    mask_share: float = field(default=0.15, metadata={"at_least": 0, "at_most": 1})
    """Share of a sample's tokens that the model must restore, at least one token; drawn anew in every epoch."""
    mask_token_id: int | Auto = field(default="auto", metadata={"at_least": 0})
    """Id of the token that hides others; auto: the tokenizer's mask token, or, where it has none, the last id of a new
    model's vocabulary, which the tokenizer may not use then."""

    def shrunk(self, tokens: int) -> Self:
        return replace(super().shrunk(tokens), mask_token_id="auto")

    def with_tokenizer(self, folder: Path) -> Self:
        token = mask_token_id(folder) if self.mask_token_id == "auto" else None
        return self if token is None else replace(self, mask_token_id=token)

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        errors = super().data_errors(data, model)
        if self.mask_token_id != "auto" or not model.path:
            return errors
        try:
            file = existing_file(model, data)
            if file is None or made_here(file.parent) or mask_token_id(file.parent) is not None:
                return errors
        except BadInputError:  # reading the tokenizer reports it
            return errors
        fix = "give the id of the token that stands for a hidden one"
        reason = f"{file} has no mask token"
        return [*errors, ConfigError("objective.mask_token_id", "auto", fix, reason)]

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        if fields["model_type"] != "deberta-v2" or fields.get("legacy", True):
            return []
        reason = "transformers names no output head of such a model"
        return [ConfigError("model.config.legacy", False, "use model.config.legacy=true, with a new head", reason)]

    def reserved_ids(self) -> int:
        return 1 if self.mask_token_id == "auto" else 0


def measure_accuracy(sums: Sequence[float]) -> dict[str, float]:
    return {"val/loss": sums[0] / sums[-1], "val/accuracy": sums[1] / sums[-1]}


MASKED_LM = Description(
    name="masked_lm",
    keys=MaskedLMConfig,
    metrics=(
        TOKEN_LOSS,
        Metric("val/accuracy", "held-out accuracy", percent=True, higher_is_better=True, headline=True),
    ),
    measured=measure_accuracy,
    counts="hidden tokens",
    model_class="AutoModelForMaskedLM",
    attention="bidirectional",
    families=families_in_role("text_encoder"),
    other_names=("mlm",),
)


@dataclass
class Seq2SeqConfig(SampledTextConfig):
    name: str = "seq2seq"

    def adapter_errors(self, model: ModelConfig, peft: PeftConfig) -> list[ConfigError]:
        if peft.name != "qlora":
            return []
        return [ConfigError("peft", "qlora", "use peft=lora", "T5 looks at the type of its weights")]


def measure_seq2seq(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right tokens, right answers, answers, and the number of tokens."""
    loss, right_tokens, right_answers, answers, tokens = sums
    return {
        "val/loss": loss / tokens,
        "val/accuracy": right_tokens / tokens,
        "val/exact_match": right_answers / answers,
    }


SEQ2SEQ = Description(
    name="seq2seq",
    keys=Seq2SeqConfig,
    metrics=(TOKEN_LOSS, TOKEN_ACCURACY, EXACT_MATCH),
    measured=measure_seq2seq,
    counts="target tokens",
    samples="pairs",
    model_class="AutoModelForSeq2SeqLM",
    attention="encoder_decoder",
    families=families_in_role("text_to_text"),
    other_names=("summarization", "translation"),
)
