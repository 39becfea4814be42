"""Every objective and adapter trains on a GPU as in one CPU process; dry, on the CPU, told and not compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.config import plugins
from tests.gpu.conftest import Programs, sampled
from tests.objectives.test_sequence_classification import write_rows
from tests.runs.support import same
from tests.support.command import column, mgpu, mgpu_anew
from tests.support.needs import need_digits, need_speech
from tests.support.sounds import RATE, list_of_tones

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
    "speech_seq2seq": ("model=whisper_tiny", "objective=speech_seq2seq", "data=audio_list")
    + ("model.config.max_source_positions=100", "objective.max_new_tokens=9"),
    "sequence_classification": ("model=bert_tiny", "objective=sequence_classification", "data=labelled_jsonl")
    + ("data.seq_len=24", "data.validation_fraction=0.2"),
    "dpo": ("model=llama_tiny", "model.config.vocab_size=384", "objective=dpo", "data=spoken_preferences")
    + ("data.chat_template=chatml", "data.numbers={count: 200, digits: 3}", "data.seq_len=80"),
}
PEFT = ("lora", "dora", "qlora", "distill")
ON_GPU = {
    "causal_lm": ("single",),
    **dict.fromkeys(("vision_language", "ctc", "speech_seq2seq", "contrastive", "dpo"), ("single", "fsdp", "zero3")),
    "image_classification": ("single", "fsdp", "zero3"),
    "averaged weights": ("single", "fsdp"),
    "muon": ("single", "fsdp"),
}


def words(name: str, folder: Path) -> tuple[str, ...]:
    chosen = OBJECTIVES[name]
    if "digit" in " ".join(chosen):
        need_digits()
    if "data=audio_list" in chosen:
        need_speech()
        (folder / "sounds").mkdir()
        return *chosen, f"data.paths=[{list_of_tones(folder / 'sounds')}]"
    if "data=labelled_jsonl" in chosen:
        return *chosen, f"data.paths=[{write_rows(folder / 'rows.jsonl')}]"
    return chosen


def test_no_objective_is_left_out() -> None:
    named = {word.partition("=")[2] for row in OBJECTIVES.values() for word in row if word.startswith("objective=")}
    assert named | {"causal_lm"} | set(PEFT) >= set(plugins.OBJECTIVES)


@pytest.mark.parametrize("name", sampled(OBJECTIVES, "speech_seq2seq"))
def test_an_objective_in_fp32_is_that_of_one_cpu_process(name: str, programs: Programs) -> None:
    chosen = (*SHORT, *words(name, programs.folder))
    for strategy in ON_GPU.get(name, ("single",)):
        programs.hold([*chosen, f"strategy={strategy}"], [*chosen, "strategy=single"], same)


@pytest.mark.parametrize("name", sampled(OBJECTIVES))
def test_an_objective_in_bf16_stays_close(name: str, programs: Programs) -> None:
    def close(mine: Path, truth: Path) -> None:
        found, wanted = column(mine, "train/loss"), column(truth, "train/loss")
        assert max(abs(found[step] / wanted[step] - 1) for step in wanted) < 2e-2

    chosen = (*SHORT, *words(name, programs.folder))
    programs.hold([*chosen, "precision=bf16"], [*chosen, "strategy=single"], close)


@pytest.mark.parametrize("name", sampled(PEFT))
def test_tuning_a_folder_in_fp32_is_that_of_one_cpu_process(name: str, programs: Programs) -> None:
    base = programs.on_gpu(*SHORT, *TEXT, "run.name=base")
    folder = programs.folder / "model"
    (mgpu if programs.dry else mgpu_anew)(programs.cache, programs.folder, "export", str(base), "--out", str(folder))
    chosen = (*SHORT, *TEXT, "model=hf", f"model.path={folder}", "peft.r=4", f"peft={name}", "optimizer.lr=3e-3")
    if name == "distill":
        chosen = (*SHORT, *TEXT, "objective=distill", f"objective.teacher={folder}", "objective.teacher_weight=0.7")
    for strategy in ("single", "fsdp", "zero2", "zero3"):
        programs.hold([*chosen, f"strategy={strategy}"], [*chosen, "strategy=single"], same)
