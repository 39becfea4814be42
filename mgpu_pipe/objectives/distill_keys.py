"""Keys and metrics of distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from mgpu_pipe.checkpoint.manifest import read_manifest, read_state
from mgpu_pipe.checkpoint.selection import resolve_source
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.text.tokenizer_folder import token_differences
from mgpu_pipe.errors import CheckpointError, ConfigError, ModelFolderError
from mgpu_pipe.models.weights.folder import read_config_json
from mgpu_pipe.objectives.text_keys import CAUSAL_LM as CAUSAL
from mgpu_pipe.objectives.text_keys import TOKEN_LOSS, SampledTextConfig, perplexity
from mgpu_pipe.system.local_files import expand_home, is_file, is_folder

DRAWN = "drawn"
"""Teacher of a run of ``verify``: the student with other weights."""
STARTS_FROM = "starts_from"
"""Teacher trained by the run of ``run.starts_from``."""
KEY = "objective.teacher"


@dataclass
class DistillConfig(SampledTextConfig):
    name: str = "distill"
    teacher: str = ""
    """The teacher's folder, a Hugging Face model's or a run's; its tokenizer is the student's. starts_from: the run of
    run.starts_from, which then gives no first weights."""
    teacher_strategy: Literal["whole", "fsdp"] = "whole"
    """whole on each process, or fsdp: sharded over the processes, and gathered block by block."""
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """forward is KL(teacher, student), reverse KL(student, teacher), jensen_shannon the mean of both to their mean."""
    temperature: float = field(default=1.0, metadata={"above": 0})
    """Both models' logits are divided by it in the divergence, which is multiplied by its square."""
    teacher_weight: float = field(default=0.5, metadata={"at_least": 0, "at_most": 1})
    """Share of the divergence in the loss; the rest is the labels' cross-entropy."""

    def shrunk(self, tokens: int) -> Self:
        return replace(super().shrunk(tokens), teacher=DRAWN)

    def started_from(self, run: Path) -> Self | None:
        return replace(self, teacher=str(run)) if self.teacher == STARTS_FROM else None

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        if self.teacher != STARTS_FROM or config.run.starts_from is not None:
            return []
        return [ConfigError(KEY, STARTS_FROM, "name the teacher's experiment by run.starts_from, or give a folder")]

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        if self.teacher == STARTS_FROM:
            return []  # checked once it exists
        try:
            teacher = _fields(self.teacher) if self.teacher else {}
        except (ModelFolderError, CheckpointError):
            teacher = {}
        if not teacher:
            fix = "give a folder that mgpu-pipe export or save_pretrained wrote, or a run's"
            return [ConfigError(KEY, self.teacher, fix, "holds no config.json of a model, and no checkpoint")]
        size, student_size = teacher.get("vocab_size"), fields.get("vocab_size")
        if size != student_size:
            reason = f"its vocabulary has {size} tokens, the student's {student_size}"
            return [
                ConfigError(KEY, self.teacher, "give a teacher with the student's tokenizer and vocabulary", reason)
            ]
        return []

    def tokenizer_errors(self, folder: Path) -> list[ConfigError]:
        teacher = expand_home(self.teacher)
        if is_run(teacher):
            run = teacher if is_folder(RunPaths(teacher).checkpoints) else teacher.parents[1]
            teacher = RunPaths(run).tokenizer
        differences = token_differences(teacher, folder)
        if not differences:
            return []
        fix = f"use data.tokenizer={teacher.absolute()}"
        return [ConfigError(KEY, self.teacher, fix, f"its tokenizer gives other ids ({differences[0]})")]


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run or one of its steps, not a model."""
    return not is_file(folder / "config.json") and is_folder(folder)


def _fields(teacher: str) -> Mapping[str, Any]:
    """Configuration fields of the teacher's model."""
    folder = expand_home(teacher)
    if not is_run(folder):
        return read_config_json(folder)
    step = resolve_source(folder, verify="size", key=KEY)
    recorded = read_state(step, read_manifest(step), "size").get("model_config")
    return recorded if isinstance(recorded, Mapping) else {}


def measure_distill(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from losses, cross-entropies (what a run without a teacher measures), divergences, and tokens."""
    return {**perplexity([sums[1], sums[-1]]), "val/divergence": sums[2] / sums[-1]}


DISTILL = Description(
    name="distill",
    keys=DistillConfig,
    metrics=(TOKEN_LOSS, CAUSAL.headline, Metric("val/divergence", "held-out divergence", "nats a token")),
    measured=measure_distill,
    refused_axes=("cp",),
)
