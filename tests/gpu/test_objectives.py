"""Every objective and adapter trains on a GPU as in one CPU process; tests/objectives is the dry form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs.support import same
from tests.support.command import column, mgpu_anew, run_folder
from tests.support.needs import need_digits, need_speech
from tests.support.sounds import RATE, list_of_tones

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHORT = (
    "precision=fp32",
    "optimizer.lr=3e-4",
    "data.global_batch_size=8",
    "data.validation_max_samples=8",
    "scheduler.warmup_steps=2",
    "trainer.max_steps=6",
    "trainer.val_every_n_steps=3",
    "trainer.deterministic=true",
    "logger=none",
)
TEXT = ("model=llama_tiny", "data=synthetic", "data.seq_len=64")
OBJECTIVES = {
    "causal_lm": TEXT,
    "gpt2": (*TEXT, "model=gpt2_tiny"),
    "qwen3": (*TEXT, "model=qwen3_tiny"),
    "muon": (*TEXT, "optimizer=muon"),
    "averaged weights": (*TEXT, "optimizer.ema.decay=0.9", "optimizer.ema.evaluate=true"),
    "masked_lm": ("model=bert_tiny", "objective=masked_lm", "data=synthetic", "data.seq_len=64"),
    "seq2seq": ("model=t5_tiny", "objective=seq2seq", "data=number_words"),
    "image_classification": ("model=vit_tiny", "objective=image_classification", "data=digits"),
    "contrastive": ("model=clip_tiny", "objective=contrastive", "data=captioned_digits"),
    "vision_language": ("model=llava_tiny", "objective=vision_language", "data=digit_questions"),
    "ctc": ("model=wav2vec2_tiny", "objective=ctc", "data=audio_list", f"data.sampling_rate={RATE}"),
    "dpo": ("model=llama_tiny", "model.config.vocab_size=384", "objective=dpo", "data=spoken_preferences")
    + ("data.chat_template=chatml", "data.numbers={count: 200, digits: 3}", "data.seq_len=80"),
}
PEFT = ("lora", "dora", "qlora", "distill")
ON_GPU = {
    "causal_lm": ("single",),
    **dict.fromkeys(("vision_language", "ctc", "contrastive", "dpo"), ("single", "fsdp", "zero3")),
    "image_classification": ("single", "fsdp", "zero3"),
    "averaged weights": ("single", "fsdp"),
    "muon": ("single", "fsdp"),
}


def words(name: str, tmp_path: Path) -> tuple[str, ...]:
    if "digit" in " ".join(OBJECTIVES[name]):
        need_digits()
    if name == "ctc":
        need_speech()
        (tmp_path / "sounds").mkdir()
        return *OBJECTIVES[name], f"data.paths=[{list_of_tones(tmp_path / 'sounds')}]"
    return OBJECTIVES[name]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_in_fp32_is_that_of_one_cpu_process(name: str, cache: Path, tmp_path: Path) -> None:
    chosen = (*SHORT, *words(name, tmp_path))
    truth = run_folder(mgpu_anew(cache, tmp_path, *chosen, "trainer.accelerator=cpu", "strategy=single"))
    for strategy in ON_GPU.get(name, ("single",)):
        same(run_folder(mgpu_anew(cache, tmp_path, *chosen, "trainer.accelerator=gpu", f"strategy={strategy}")), truth)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_in_bf16_stays_close(name: str, cache: Path, tmp_path: Path) -> None:
    chosen = (*SHORT, *words(name, tmp_path))
    truth = run_folder(mgpu_anew(cache, tmp_path, *chosen, "trainer.accelerator=cpu", "strategy=single"))
    mine = run_folder(mgpu_anew(cache, tmp_path, *chosen, "trainer.accelerator=gpu", "precision=bf16"))
    found, wanted = column(mine, "train/loss"), column(truth, "train/loss")
    assert max(abs(found[step] / wanted[step] - 1) for step in wanted) < 2e-2


@pytest.mark.parametrize("name", PEFT)
def test_tuning_a_folder_in_fp32_is_that_of_one_cpu_process(name: str, cache: Path, tmp_path: Path) -> None:
    base = run_folder(mgpu_anew(cache, tmp_path, *SHORT, *TEXT, "trainer.accelerator=gpu", "run.name=base"))
    folder = tmp_path / "model"
    mgpu_anew(cache, tmp_path, "export", str(base), "--out", str(folder))
    chosen = (*SHORT, *TEXT, "model=hf", f"model.path={folder}", "peft.r=4", f"peft={name}", "optimizer.lr=3e-3")
    if name == "distill":
        chosen = (*SHORT, *TEXT, "objective=distill", f"objective.teacher={folder}", "objective.teacher_weight=0.7")
    truth = run_folder(mgpu_anew(cache, tmp_path, *chosen, "trainer.accelerator=cpu", "strategy=single"))
    for strategy in ("single", "fsdp", "zero2", "zero3"):
        same(run_folder(mgpu_anew(cache, tmp_path, *chosen, "trainer.accelerator=gpu", f"strategy={strategy}")), truth)
