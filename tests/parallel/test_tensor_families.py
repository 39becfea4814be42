"""Families whose queries, keys and values (or experts) are fused, and models of other kinds. Oracle: one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checks.model_axes import tensor_parallel_errors
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.tensor.apply import apply_tensor_parallel
from mgpu_pipe.parallel.tensor.collectives import reduce_replicated_gradients
from mgpu_pipe.parallel.tensor.cut import tensor_plan
from tests.families.step import whole_model
from tests.parallel.test_tensor import worst
from tests.support.filling import assembled, fill, owned_shards
from tests.support.processes import run_processes
from tests.support.tiny import SEQ_LEN, step_batch

HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "sliding_window": 9,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {**HEADS, "intermediate_size": 96, "pad_token_id": 0}),
    "bloom": ("bloom", {"num_attention_heads": 8, "hidden_size": 64}),
    "opt": (
        "opt",
        {"num_attention_heads": 8, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "dropout": 0.0},
    ),
    "falcon of groups": (
        "falcon",
        {"num_attention_heads": 8, "num_kv_heads": 4, "hidden_size": 64, "new_decoder_architecture": True},
    ),
    "falcon of heads": ("falcon", {"num_attention_heads": 8, "hidden_size": 64, "multi_query": False, "bias": True}),
    "gpt_oss": ("gpt_oss", {**HEADS, **EXPERTS}),
    "gpt_oss, key-value heads shared": ("gpt_oss", {**HEADS, **EXPERTS, "num_key_value_heads": 2}),
}


def small(name: str) -> ModelConfig:
    family, fields = VARIANTS[name]
    return ModelConfig(name=family, type=family, config={"vocab_size": 96, "num_hidden_layers": 2, **fields})


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    objective, batch = CausalLMObjective(model, None, lambda step: 1.0, 7), step_batch(0, 0, 1, 8)
    loss = objective.micro_batch_loss(batch.micro_batches[0]) / batch.loss_denominator
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut(names: list[str]) -> dict[str, tuple[float, Any]]:
    """This rank's losses and its pieces of the gradients."""
    found = {}
    for name in names:
        config = small(name)
        model = build_meta(config)
        assert dist.group.WORLD is not None
        apply_tensor_parallel(model, dist.group.WORLD)
        fill(model, {key: p.detach() for key, p in whole_model(config).named_parameters()})
        loss, _ = step(model)
        reduce_replicated_gradients(model, dist.group.WORLD)
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        found[name] = (loss, owned_shards(model, gradients))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_loss_and_gradients_are_those_of_one_process(ranks: int) -> None:
    found = run_processes(ranks, cut, list(VARIANTS))
    for name in VARIANTS:
        whole = whole_model(small(name))
        loss, expected = step(whole)
        gradients = assembled([shard for result in found for shard in result[name][1]], expected)
        total = float(torch.stack([g.double().square().sum() for g in expected.values()]).sum().sqrt())
        assert gradients.keys() == expected.keys()
        for result in found:
            assert abs(result[name][0] / loss - 1) < 1e-5, name
        for key, gradient in gradients.items():
            error = float((gradient - expected[key]).double().norm())
            assert error <= 1e-5 * float(expected[key].double().norm()) + 1e-7 * total, (name, key)


def said(family: str, tp: int, **fields: Any) -> list[str]:
    known = resolved_fields(ModelConfig(name=family, type=family, config=fields))
    return [str(error) for error in tensor_parallel_errors(known, family, tp, False, SEQ_LEN)]


def test_what_cannot_be_cut_is_refused() -> None:
    assert said("falcon", 2) == [
        "strategy.tp=2: this kind of falcon has weights that cannot be cut; use strategy.tp=1, or "
        "model.config of new_decoder_architecture=true, alibi=false or of multi_query=false, alibi=false"
    ]
    with pytest.raises(ConfigError, match="this kind of falcon"):
        fields = {"num_attention_heads": 4, "hidden_size": 32, "vocab_size": 96, "num_hidden_layers": 1}
        tensor_plan(build_meta(ModelConfig(name="falcon", type="falcon", config=fields)))
    (heads,) = said("phi3", 3, num_attention_heads=6, num_key_value_heads=2, intermediate_size=96)
    assert heads.startswith("strategy.tp=3: it does not divide the 2 key-value heads, fused with the queries; use one")
    assert said("bloom", 2) == said("opt", 2) == said("phi3", 2) == said("gpt_oss", 2) == []


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


@pytest.mark.slow
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
