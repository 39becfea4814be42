"""Every tiny model that is shipped trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.system.conf_folders import conf_dir
from tests.support.needs import need_digits, need_speech
from tests.support.processes import run_processes
from tests.support.sampling import sampled

TINY = sorted(path.stem for path in (conf_dir() / "model").glob("*_tiny.yaml"))

SEEING = (
    *("llava_tiny", "qwen25_vl_tiny", "qwen3_vl_tiny", "smolvlm_tiny", "paligemma_tiny"),
    *("gemma3_tiny", "gemma4_tiny", "internvl_tiny", "llama4_tiny", "mistral3_tiny", "phi4_multimodal_tiny"),
    "qwen35_tiny",
)
HEARING = ("qwen2_audio_tiny", "qwen25_omni_tiny", "voxtral_tiny")
"""Trained by tests/objectives/test_recordings.py."""
TWO_TOWERS = ("clip_tiny", "vit_bert_tiny")
OBJECTIVES = {
    **{"bert_tiny": "masked_lm", "t5_tiny": "seq2seq"},
    **{"vit_tiny": "image_classification", **dict.fromkeys(TWO_TOWERS, "contrastive")},
    **dict.fromkeys(SEEING, "vision_language"),
    **{"ast_tiny": "sound_classification", "wav2vec2_tiny": "ctc", "whisper_tiny": "speech_seq2seq"},
}
DATA = {
    **{"t5_tiny": "number_words", "vit_tiny": "digits"},
    **{"ast_tiny": "spoken_single_digits", **dict.fromkeys(("wav2vec2_tiny", "whisper_tiny"), "spoken_digits")},
    **{**dict.fromkeys(TWO_TOWERS, "captioned_digits"), **dict.fromkeys(SEEING, "digit_questions")},
}
CLASSES = {
    "ast_tiny": 10,
    "vit_tiny": 10,
    **dict.fromkeys(TWO_TOWERS, 8),
    "whisper_tiny": 384,
    **dict.fromkeys(SEEING, 384),
}
SMALL = {"smolvlm_tiny": ["data.max_side=8"], "gemma4_tiny": ["data.max_pixels=64"]}
"""Pictures that leave room for a conversation."""


def two_steps(folder: str, overrides: list[str]) -> dict[str, Any]:
    from mgpu_pipe.training.train import train

    config, _ = compose(overrides)
    return train(config, RunPaths(Path(folder)), prepare(config)).summary


def test_the_tiny_models_are_the_promised_families() -> None:
    assert TINY == [
        "ast_tiny",
        "bert_tiny",
        "clip_tiny",
        "gemma3_tiny",
        "gemma4_tiny",
        "gpt2_tiny",
        "internvl_tiny",
        "llama4_tiny",
        "llama_tiny",
        "llava_tiny",
        "mistral3_tiny",
        "mixtral_tiny",
        "paligemma_tiny",
        "phi4_multimodal_tiny",
        "qwen25_omni_tiny",
        "qwen25_vl_tiny",
        "qwen2_audio_tiny",
        "qwen35_tiny",
        "qwen3_tiny",
        "qwen3_vl_tiny",
        "smolvlm_tiny",
        "t5_tiny",
        "vit_bert_tiny",
        "vit_tiny",
        "voxtral_tiny",
        "wav2vec2_tiny",
        "whisper_tiny",
    ]


AS_OTHERS = (
    *("clip_tiny", "llava_tiny", "paligemma_tiny", "qwen25_vl_tiny", "smolvlm_tiny", "vit_bert_tiny", "wav2vec2_tiny"),
    *("bert_tiny", "gemma3_tiny", "gemma4_tiny", "internvl_tiny", "llama_tiny", "mistral3_tiny", "qwen35_tiny"),
    *("llama4_tiny", "qwen3_vl_tiny", "t5_tiny", "vit_tiny", "whisper_tiny", "ast_tiny"),
)
"""Commands of docs/guides/images.md and speech.md train them, or tests/objectives and tests/runs; ``make test``
tries the others."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", sampled([(name,) for name in TINY if name not in HEARING], lambda name: name not in AS_OTHERS)
)
def test_every_tiny_model_trains_two_steps(model: str, cache: Path, tmp_path: Path) -> None:
    spoken = DATA.get(model, "").startswith("spoken")
    if spoken:
        need_speech("espeak-ng")
    elif "digits" in DATA.get(model, ""):
        need_digits()
    overrides = [
        f"model={model}",
        f"objective={OBJECTIVES.get(model, 'causal_lm')}",
        f"data={DATA.get(model, 'synthetic')}",
        "strategy=ddp",
        "trainer.devices=2",
        "trainer.max_steps=2",
        "optimizer.lr=1e-6",
        "logger=none",
        f"data.seq_len={64 if model in SEEING else 32}",
        "data.global_batch_size=8",
        f"data.cache_dir={cache}",
        "data.validation_max_samples=8",
        "trainer.progress=off",
        *(["data.recordings=24"] if spoken else []),
        *SMALL.get(model, []),
    ]
    config, _ = compose(overrides)
    freeze(config, RunPaths(tmp_path).config)
    prepare(config)
    for summary in run_processes(2, two_steps, str(tmp_path), overrides):
        assert summary["status"] == "finished" and summary["step"] == 2
        # Random tokens and weights: the loss starts at the logarithm of the vocabulary, and half the logits' variance
        # above it, which is 1 in T5's, LLaVA's and Qwen-VL's initial weights and nearly 0 in the others'.
        start = math.log(CLASSES.get(model, 1024)) + 0.5 * (model in ("t5_tiny", *SEEING))
        # A transcript has many alignments, and more frames than characters.
        assert model == "wav2vec2_tiny" or abs(summary["metrics"]["val/loss"] - start) < 0.5
    assert (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").exists()
