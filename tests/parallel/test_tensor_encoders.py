"""Models of other kinds, by this project's own plans. Oracle: the same model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.parallel.tensor.apply import apply_tensor_parallel
from mgpu_pipe.parallel.tensor.collectives import reduce_replicated_gradients
from tests.parallel.test_tensor import worst
from tests.support.filling import assembled, owned_shards
from tests.support.processes import run_processes

pytestmark = pytest.mark.slow

TEXT = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "max_position_embeddings": 16},
}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 8, "patch_size": 4},
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {"text_config": {**TEXT, "eos_token_id": 49}, "vision_config": VISION, "projection_dim": 16},
    ),
    "siglip": ("SiglipConfig", "SiglipModel", {"text_config": TEXT, "vision_config": VISION}),
    "vit": ("ViTConfig", "ViTForImageClassification", VISION),
    "wav2vec2": (
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        {
            **{"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "conv_dim": [16, 16], "conv_kernel": [5, 3], "conv_stride": [4, 2]},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
            **{"feat_proj_dropout": 0.0, "mask_time_prob": 0.0},
        },
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **{"vocab_size": 51, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48},
            **{"decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
            **{"dropout": 0.0},
        },
    ),
    "llava": (
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": 49,
            "vision_feature_layer": -1,
        },
    ),
}


def built(name: str) -> Any:
    """The model with its own initialisation, the same in every process, and no dropout."""
    import transformers

    config_name, model_name, fields = MODELS[name]
    torch.manual_seed(3)
    return getattr(transformers, model_name)(getattr(transformers, config_name)(**fields)).eval()


def inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 49, (2, 10), generator=generator)
    pixels = torch.randn(2, 3, 8, 8, generator=generator)
    if name in ("clip", "siglip"):
        return {"input_ids": ids, "pixel_values": pixels}
    if name == "vit":
        return {"pixel_values": pixels}
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 160, generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 16, generator=generator), "decoder_input_ids": ids}
    ids[:, :4] = 49
    return {"input_ids": ids, "pixel_values": pixels}


def backward(name: str, model: Any) -> float:
    output = model(**inputs(name))
    scores = output.logits_per_text if "logits_per_text" in output else output.logits
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5))
    loss = (scores.log_softmax(-1) * weights).sum()
    loss.backward()
    return float(loss.detach())


def in_parallel(name: str) -> dict[str, Any]:
    model, group = built(name), dist.group.WORLD
    assert group is not None
    apply_tensor_parallel(model, group)
    loss = backward(name, model)
    reduce_replicated_gradients(model, group)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "pieces": owned_shards(model, gradients)}


@pytest.mark.parametrize("name", list(MODELS))
def test_every_gradient_is_that_of_one_process(name: str) -> None:
    model = built(name)
    loss = backward(name, model)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    results = run_processes(2, in_parallel, name)
    gradients = assembled((shard for result in results for shard in result["pieces"]), expected)
    for result in results:
        assert abs(result["loss"] / loss - 1) < 1e-5
    cut = {shard[0] for shard in results[0]["pieces"] if shard[2].shape != expected[shard[0]].shape}
    assert len(cut) > 8
    error, where = worst(gradients, expected)
    print(f"{name}: error over bound {error:.4f} ({where})")
    assert error < 1, where
