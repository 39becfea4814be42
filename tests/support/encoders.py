"""Models of pictures and speech in the matrices: tiny ones, their objectives' own batches, and their plain losses."""

from __future__ import annotations

import functools
from typing import Any

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.objectives.contrastive import ContrastiveObjective
from mgpu_pipe.objectives.ctc import CTCObjective
from mgpu_pipe.objectives.image_classification import ImageClassificationObjective
from mgpu_pipe.objectives.seq2seq import SpeechSeq2SeqObjective
from mgpu_pipe.objectives.transcript_keys import SpeechSeq2SeqConfig
from mgpu_pipe.objectives.vision_language import VisionLanguageObjective
from tests.support.learned import Learned
from tests.support.tiny import COMMON, SEQ_LEN, VOCABULARY

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
}
PICTURE = {"image_size": 8, "patch_size": 4, "num_channels": 1}
TEXT = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}
WHISPER_SIDE = (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
ENDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
PLACES = {"image_token_id": VOCABULARY - 1, "video_token_id": VOCABULARY - 2, "vision_start_token_id": VOCABULARY - 3}
OWN_SIZES = {
    **{key: TOWER[key] for key in ("hidden_size", "intermediate_size")},
    **{"num_heads": 4, "depth": 2, "in_channels": 1, "patch_size": 2, "temporal_patch_size": 1, "out_hidden_size": 32},
}
"""A tower of pictures in sizes of their own."""
THREE_AXES = {
    **COMMON,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
ENCODER_MODELS = {
    name: ModelConfig(name=name, type=name, config=dict[str, Any](config))  # type: ignore[call-overload]
    for name, config in {
        "clip": {"projection_dim": 16, "text_config": {**TOWER, **TEXT}, "vision_config": {**TOWER, **PICTURE}},
        "siglip": {"text_config": {**TOWER, **TEXT}, "vision_config": {**TOWER, **PICTURE}},
        "vit": {
            **{key: value for key, value in TOWER.items() if key != "attention_dropout"},
            **PICTURE,
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            "id2label": {str(number): str(number) for number in range(5)},
            "label2id": {str(number): number for number in range(5)},
        },
        "llava": {
            **{"vision_feature_layer": -1, "image_token_index": VOCABULARY - 1},
            "text_config": {**COMMON, "model_type": "llama", "attention_dropout": 0.0},
            "vision_config": {**TOWER, **PICTURE, "model_type": "clip_vision_model"},
        },
        "qwen2_5_vl": {
            **PLACES,
            "text_config": {**THREE_AXES, "model_type": "qwen2_5_vl_text", **dict.fromkeys(ENDS)},
            "vision_config": {
                **{**OWN_SIZES, "model_type": "qwen2_5_vl_vision"},
                **{"window_size": 8, "fullatt_block_indexes": [1]},
            },
        },
        "qwen3_vl": {
            **PLACES,
            "text_config": {**THREE_AXES, "model_type": "qwen3_vl_text", "head_dim": 8},
            "vision_config": {
                **{**OWN_SIZES, "model_type": "qwen3_vl_vision"},
                **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            },
        },
        "paligemma": {
            **{"image_token_index": VOCABULARY - 1, "projection_dim": 32, "hidden_size": 32},
            "text_config": {
                **{**COMMON, "model_type": "gemma", "head_dim": 8, "attention_dropout": 0.0, "pad_token_id": None}
            },
            "vision_config": {**TOWER, **PICTURE, "model_type": "siglip_vision_model", "vision_use_head": False},
        },
        "smolvlm": {
            **{"image_token_id": VOCABULARY - 1, "scale_factor": 2},
            "text_config": {**COMMON, "model_type": "llama", "attention_dropout": 0.0, "pad_token_id": None},
            "vision_config": {**TOWER, **PICTURE, "model_type": "smolvlm_vision"},
        },
        "wav2vec2": {
            **TOWER,
            **{
                "conv_dim": [16, 16],
                "conv_kernel": [10, 4],
                "conv_stride": [5, 4],
                "vocab_size": 12,
                "pad_token_id": 0,
            },
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_length": 3},
            **dict.fromkeys(("layerdrop", "hidden_dropout", "activation_dropout"), 0.0),
            **{"feat_proj_dropout": 0.0, "final_dropout": 0.0},
        },
        "whisper": {
            **{"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16},
            **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in WHISPER_SIDE},
            **{**ENDS, "decoder_start_token_id": 1, "max_target_positions": 32},
        },
    }.items()
}


SEEING = ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "paligemma")


def whisper_objective(model: Any, optimizer: Any, learning_rate: Any) -> SpeechSeq2SeqObjective:
    return SpeechSeq2SeqObjective(model, optimizer, learning_rate, SpeechSeq2SeqConfig(loss_chunk_tokens=7))


def seeing_objective(model: Any, optimizer: Any, learning_rate: Any) -> VisionLanguageObjective:
    return VisionLanguageObjective(model, optimizer, learning_rate, 7)


def learned(name: str, model_class: str, objective: Any) -> Learned:
    """``objective``, on its own random batches, beside its plain loss."""

    @functools.lru_cache(maxsize=None)
    def made() -> Any:
        return objective(build_meta(ENCODER_MODELS[name], model_class), None, lambda step: 1.0)

    def batch(step: int, samples: int) -> Any:
        return made().random_batch(6000, step, samples, SEQ_LEN, False)

    def loss(forward: Any, part: Any) -> Any:
        return made().reference_loss(forward, forward.args[0], part).loss_sum

    return Learned(model_class, objective, batch, loss)


ENCODERS = {
    "clip": learned("clip", "AutoModelForZeroShotImageClassification", ContrastiveObjective),
    "siglip": learned("siglip", "AutoModelForZeroShotImageClassification", ContrastiveObjective),
    "vit": learned("vit", "AutoModelForImageClassification", ImageClassificationObjective),
    **{name: learned(name, "AutoModelForImageTextToText", seeing_objective) for name in SEEING},
    "wav2vec2": learned("wav2vec2", "AutoModelForCTC", CTCObjective),
    "whisper": learned("whisper", "AutoModelForSpeechSeq2Seq", whisper_objective),
}
