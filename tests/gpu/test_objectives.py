"""Every objective and adapter trains on a GPU as in one CPU process; dry, on the CPU, told and not compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.config import plugins
from tests.gpu.conftest import Programs, sampled
from tests.runs.support import same
from tests.support.command import column, mgpu, mgpu_anew
from tests.support.objectives import OBJECTIVES, TEXT, list_overrides

SHORT = (
    *("precision=fp32", "optimizer.lr=3e-4", "data.global_batch_size=8", "data.validation_max_samples=8"),
    *("scheduler.warmup_steps=2", "trainer.max_steps=6", "trainer.val_every_n_steps=3", "trainer.deterministic=true"),
    "logger=none",
)
VARIANTS = {
    **OBJECTIVES,
    "gpt2": (*TEXT, "model=gpt2_tiny"),
    "qwen3": (*TEXT, "model=qwen3_tiny"),
    "muon": (*TEXT, "optimizer=muon"),
    "averaged weights": (*TEXT, "optimizer.ema.decay=0.9", "optimizer.ema.evaluate=true"),
}
PEFT = ("lora", "dora", "qlora", "distill")
ON_GPU = {
    "causal_lm": ("single",),
    **dict.fromkeys(("vision_language", "ctc", "speech_seq2seq", "contrastive", "dpo"), ("single", "fsdp", "zero3")),
    "image_classification": ("single", "fsdp", "zero3"),
    "averaged weights": ("single", "fsdp"),
    "muon": ("single", "fsdp"),
}


def test_no_objective_is_left_out() -> None:
    named = {word.partition("=")[2] for row in OBJECTIVES.values() for word in row if word.startswith("objective=")}
    assert named | {"causal_lm"} | set(PEFT) >= set(plugins.OBJECTIVES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(VARIANTS, "speech_seq2seq"))
def test_an_objective_in_fp32_is_that_of_one_cpu_process(name: str, programs: Programs) -> None:
    chosen = (*SHORT, *list_overrides(name, programs.folder, VARIANTS))
    for strategy in ON_GPU.get(name, ("single",)):
        programs.hold([*chosen, f"strategy={strategy}"], [*chosen, "strategy=single"], same)


@pytest.mark.parametrize("name", sampled(VARIANTS))
def test_an_objective_in_bf16_stays_close(name: str, programs: Programs) -> None:
    def close(mine: Path, truth: Path) -> None:
        found, wanted = column(mine, "train/loss"), column(truth, "train/loss")
        assert max(abs(found[step] / wanted[step] - 1) for step in wanted) < 2e-2

    chosen = (*SHORT, *list_overrides(name, programs.folder, VARIANTS))
    programs.hold([*chosen, "precision=bf16"], [*chosen, "strategy=single"], close)


@pytest.mark.parametrize("name", sampled(PEFT))
def test_tuning_a_folder_in_fp32_is_that_of_one_cpu_process(name: str, programs: Programs) -> None:
    base = programs.on_gpu(*SHORT, *TEXT, "run.name=base")
    folder = programs.folder / "model"
    (mgpu if programs.dry else mgpu_anew)(programs.cache, programs.folder, "export", str(base), "--out", str(folder))
    chosen: tuple[str, ...] = (
        *SHORT,
        *TEXT,
        "model=hf",
        f"model.path={folder}",
        "peft.r=4",
        f"peft={name}",
        "optimizer.lr=3e-3",
    )
    if name == "distill":
        chosen = (*SHORT, *TEXT, "objective=distill", f"objective.teacher={folder}", "objective.teacher_weight=0.7")
    for strategy in ("single", "fsdp", "zero2", "zero3"):
        programs.hold([*chosen, f"strategy={strategy}"], [*chosen, "strategy=single"], same)
