"""Keys and metrics of masked language modelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import Self

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import Auto, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import existing_file, made_here, mask_token_id
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.objectives.text_config import TokenLossConfig
from mgpu_pipe.objectives.text_embedding_keys import ENCODERS


@dataclass
class MaskedLMConfig(TokenLossConfig):
    name: str = "masked_lm"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    mask_share: float = field(default=0.15, metadata={"at_least": 0, "at_most": 1})
    """Share of a sample's tokens that are to be found again, at least one; drawn anew in every epoch."""
    mask_token_id: int | Auto = field(default="auto", metadata={"at_least": 0})
    """What stands for a hidden token; auto: the tokenizer's mask token, or, where it has none, the last id of a new
    model's vocabulary, which the tokenizer may not use then."""

    def shrunk(self, tokens: int) -> Self:
        return replace(super().shrunk(tokens), mask_token_id="auto")

    def with_tokenizer(self, folder: Path) -> Self:
        token = mask_token_id(folder) if self.mask_token_id == "auto" else None
        return self if token is None else replace(self, mask_token_id=token)

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        errors = super().run_errors(config)
        if self.mask_token_id != "auto" or not config.model.path:
            return errors
        try:
            file = existing_file(config)
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


def measured(sums: Sequence[float]) -> dict[str, float]:
    return {"val/loss": sums[0] / sums[-1], "val/accuracy": sums[1] / sums[-1]}


DESCRIPTION = Description(
    name="masked_lm",
    keys=MaskedLMConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a token"),
        Metric("val/accuracy", "held-out accuracy", percent=True, higher_is_better=True, headline=True),
    ),
    measured=measured,
    counts="hidden tokens",
    model_class="AutoModelForMaskedLM",
    attention="bidirectional",
    families=ENCODERS,
    other_names=("mlm",),
)
