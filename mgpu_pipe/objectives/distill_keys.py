"""What code without torch knows of distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import Auto, ObjectiveConfig
from mgpu_pipe.data.text.tokenizer_folder import token_differences
from mgpu_pipe.errors import ConfigError, ModelFolderError
from mgpu_pipe.models.folder import read_config_json
from mgpu_pipe.objectives.causal_lm_keys import DESCRIPTION as CAUSAL
from mgpu_pipe.objectives.causal_lm_keys import LOSS, perplexity

DRAWN = "drawn"
"""The teacher of a small run of ``verify``: the student itself with other weights."""


@dataclass
class DistillConfig(ObjectiveConfig):
    name: str = "distill"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    teacher: str = ""
    """The teacher's Hugging Face model folder, as export writes it; its tokenizer is the student's."""
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """forward is KL(teacher, student), reverse KL(student, teacher), jensen_shannon the mean of both to their mean."""
    temperature: float = field(default=1.0, metadata={"above": 0})
    """Both models' logits are divided by it in the divergence, which is multiplied by its square."""
    teacher_weight: float = field(default=0.5, metadata={"at_least": 0, "at_most": 1})
    """Share of the divergence in the loss; the rest is the labels' cross-entropy."""
    loss_chunk_tokens: int | Auto = field(default="auto", metadata={"at_least": 0})
    """Tokens whose logits exist at once in the loss; auto bounds them to 64 MiB (GPUs: 256); 0 computes them whole."""
    sample_prompts: list[str] = field(default_factory=list)
    """Prompts continued after training and shown with the result."""
    sample_max_new_tokens: int = field(default=64, metadata={"at_least": 1})
    """Tokens a sample continues for."""

    def shrunk(self, tokens: int) -> Self:
        chunk = 0 if self.loss_chunk_tokens == 0 else max(1, tokens * 2 // 5)
        return replace(self, teacher=DRAWN, sample_prompts=[], loss_chunk_tokens=chunk)

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_prompts, self.sample_max_new_tokens

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        key = "objective.teacher"
        try:
            teacher = read_config_json(Path(self.teacher).expanduser()) if self.teacher else {}
        except ModelFolderError:
            teacher = {}
        if not teacher:
            fix = "give a folder that mgpu-pipe export or save_pretrained wrote"
            return [ConfigError(key, self.teacher, fix, "holds no config.json of a model")]
        size, own = teacher.get("vocab_size"), fields.get("vocab_size")
        if size != own:
            reason = f"its vocabulary has {size} tokens, the student's {own}"
            return [
                ConfigError(key, self.teacher, "give a teacher with the student's tokenizer and vocabulary", reason)
            ]
        return []

    def tokenizer_errors(self, folder: Path) -> list[ConfigError]:
        teacher = Path(self.teacher).expanduser()
        differences = token_differences(teacher, folder)
        if not differences:
            return []
        fix = f"use data.tokenizer={teacher.absolute()}"
        return [
            ConfigError("objective.teacher", self.teacher, fix, f"its tokenizer gives other ids ({differences[0]})")
        ]


def measured(sums: Sequence[float]) -> dict[str, float]:
    """From the sums of losses, of cross-entropies, of divergences, and the number of tokens."""
    of_labels = perplexity([sums[1], sums[-1]])
    return {
        "val/loss": sums[0] / sums[-1],
        "val/perplexity": of_labels["val/perplexity"],
        "val/divergence": sums[2] / sums[-1],
    }


DESCRIPTION = Description(
    name="distill",
    keys=DistillConfig,
    metrics=(
        LOSS,
        replace(CAUSAL.headline, of_loss=None),
        Metric("val/divergence", "held-out divergence", "nats a token"),
    ),
    measured=measured,
    refused_axes=("tp", "cp"),
)
