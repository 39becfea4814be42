"""Closed forms of parameters and FLOPs against the real modules, and torch's own FLOP counter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mgpu_pipe.architectures.find import FAMILIES
from mgpu_pipe.architectures.formulas.flops import (
    Shape,
    attention_forward_flops,
    known_gpu_peak,
    mean_context,
    windowed_context,
)
from mgpu_pipe.architectures.formulas.parameters import (
    CAUSAL,
    ParameterCount,
    count_parameters,
    has_exact_sizes,
    layer_counts,
)
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models.active_parameters import active_matmul_parameters, training_flops_per_token
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import model_types, resolved_fields
from mgpu_pipe.models.model_parts import freeze_parameters
from tests.models.tiny import tiny_model

SHIPPED = sorted((Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
UNCOUNTED = (
    *("hf", "bert_tiny", "bert_small", "t5_mini", "t5_tiny", "vit_tiny", "vit_b16"),
    *("clip_tiny", "clip_vit_b32", "clip_vit_l14", "siglip2_base", "vit_bert_tiny", "gemma4_tiny", "qwen35_tiny"),
    "llama4_tiny",
    "phi4_multimodal_tiny",
    *("wav2vec2_tiny", "wav2vec2_base", "whisper_tiny", "whisper_small", "ast_tiny"),
    *("qwen2_audio_tiny", "qwen25_omni_tiny", "voxtral_tiny"),
)
"""Options whose parameters no formula counts: the first names no model."""


def shipped_model(file: Path) -> ModelConfig:
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    return ModelConfig(name=file.stem, type=content["type"], config=content["config"])


def built(model: ModelConfig) -> Any:
    return build_meta(model, "AutoModelForImageTextToText" if "vision_config" in model.config else CAUSAL)


def counted_parameters(model: ModelConfig) -> ParameterCount | None:
    return count_parameters(resolved_fields(model))


@pytest.mark.parametrize("file", [file for file in SHIPPED if file.stem not in UNCOUNTED], ids=lambda file: file.stem)
def test_count_is_exact_for_every_shipped_model(file: Path) -> None:
    model = shipped_model(file)
    counted = counted_parameters(model)
    assert counted is not None
    assert counted.total == sum(parameter.numel() for parameter in built(model).parameters())
    assert counted.active <= counted.total
    if file.stem.endswith("_tiny"):
        assert counted.total < 1_000_000


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": None, "head_dim": None}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [0], "num_hidden_layers": 4}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
        ("mixtral", {"tie_word_embeddings": True}),
        ("gpt2", {"n_inner": 100, "tie_word_embeddings": False}),
    ],
)
def test_count_is_exact_for_variants(family: str, config: dict[str, Any]) -> None:
    model = tiny_model(family, **config)
    counted = counted_parameters(model)
    assert counted is not None
    assert counted.total == sum(parameter.numel() for parameter in build_meta(model).parameters())


def test_other_families_are_not_guessed() -> None:
    assert counted_parameters(tiny_model("opt")) is None


LAYERS = 4
EXACT = (
    *("llama", "qwen3_moe", "gpt2", "gpt_oss", "gemma3_text", "deepseek_v3", "qwen2_moe", "phi3", "gemma2", "olmo2"),
    *("starcoder2", "gemma", "glm4"),
)
FAR = {"bitnet": 0.3, "jetmoe": 0.25, "gemma4_text": 0.45, "whisper": 0.3, "jamba": 0.8}
"""Relative errors of families whose layers have more than their fields say."""
TYPICAL = 0.08


def layer_sizes(family: str) -> tuple[list[int], list[int], bool]:
    """Parameters of four layers of the family's default width, built and by the formula; whether that is exact."""
    model = ModelConfig(name=family, type=family, config={"num_hidden_layers": LAYERS})
    lists = (_lists_of_layers(each) for each in build_meta(model).modules())
    blocks = zip(*next(found for found in lists if found), strict=True)  # XLM has a list for each part of a layer
    fields = resolved_fields(model)
    formula = [layer.total for layer in layer_counts(fields)]
    in_blocks = [sum(p.numel() for part in block for p in part.parameters()) for block in blocks]
    return in_blocks, formula, has_exact_sizes(fields)


def _lists_of_layers(module: nn.Module) -> list[nn.ModuleList]:
    return [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == LAYERS]


@pytest.mark.parametrize("family", EXACT)
def test_known_families_are_counted_exactly(family: str) -> None:
    built, formula, is_exact = layer_sizes(family)
    assert built == formula and is_exact


def decoders() -> Iterator[str]:
    known = set(model_types())
    yield from (name for name in FAMILIES if name in known and FAMILIES[name].causal)


def test_other_families_are_near() -> None:
    """Mixtures of experts among them, which twelve squared widths would miss by a factor of ten."""
    tried, wrong = 0, {}
    for family in decoders():
        try:
            built, formula, is_exact = layer_sizes(family)
        except (ConfigError, ConfigErrors, StopIteration):  # its defaults do not go with four layers of one kind
            continue
        tried += 1
        error = abs(formula[-1] / built[-1] - 1)  # the first layer may be dense, which transformers decides
        if error > FAR.get(family, 0.0 if is_exact else TYPICAL):
            wrong[family] = error
    assert tried > 55 and wrong == {}


def test_published_sizes() -> None:
    by_name = {file.stem: counted_parameters(shipped_model(file)) for file in SHIPPED if file.stem not in UNCOUNTED}
    rounded = {name: (round(c.total / 1e9, 1), round(c.active / 1e9, 1)) for name, c in by_name.items() if c}
    assert rounded["llama3_8b"] == (8.0, 8.0)
    assert rounded["llama3_70b"] == (70.6, 70.6)
    assert rounded["mixtral_8x7b"] == (46.7, 12.9)
    assert rounded["qwen3_30b_a3b"] == (30.5, pytest.approx(3.3, abs=0.11))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    all_experts = {"num_experts_per_tok": 4, "experts_implementation": "eager"}
    model = tiny_model(family, **(all_experts if family == "mixtral" else {}))
    model.attn_implementation = "eager"  # the counter does not know every fused kernel
    real = materialise(build_meta(model), 1, "cpu")
    length = 32
    counter = FlopCounterMode(display=False)
    with counter:
        real(input_ids=torch.arange(3, 3 + length)[None], use_cache=False).logits.sum().backward()
    ours = training_flops_per_token(real.config, length) * length
    shape = Shape.from_fields(real.config)
    attention = 3 * shape.layers * attention_forward_flops(shape, length) * length
    # Torch counts the whole square of scores, not the causal half; norms and biases are in our 6N, not in its matmuls.
    assert counter.get_total_flops() == pytest.approx(ours + attention, rel=0.02)


def test_frozen_parameters_and_windows_cost_less() -> None:
    """Oracles: torch's counter of a model that is frozen but for its last layer; tokens counted one by one."""
    model = tiny_model("llama")
    model.attn_implementation = "eager"
    real = materialise(build_meta(model), 1, "cpu")
    length, patterns = 32, ["model.embed_tokens.*", "model.layers.1.*", "lm_head.*"]

    def counted() -> int:
        with FlopCounterMode(display=False) as counter:
            real(input_ids=torch.arange(3, 3 + length)[None], use_cache=False).logits.sum().backward()
        return int(counter.get_total_flops())

    def ours() -> float:
        return length * training_flops_per_token(real.config, length, freeze=lambda m: freeze_parameters(m, patterns))

    whole, before = counted(), length * training_flops_per_token(real.config, length)
    freeze_parameters(real, patterns)
    assert before - ours() == pytest.approx(whole - counted(), rel=0.02)

    for window in (1, 5, 32, 40):
        tokens = sum(min(at + 1, window) for at in range(4096))
        assert windowed_context(4096, window) / 2 == pytest.approx(tokens / 4096, abs=0.51)
    assert windowed_context(32, 40) == 32
    sliding = {"sliding_window": 8}
    assert mean_context(32, sliding) == windowed_context(32, 8) and mean_context(32, {}) == 32
    assert mean_context(32, {**sliding, "use_sliding_window": False}) == 32
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert mean_context(32, {**sliding, "layer_types": kinds}) == (windowed_context(32, 8) + 3 * 32) / 4
    hybrid = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]  # as Qwen3.5's
    assert mean_context(4096, {"layer_types": hybrid}) == 1024
    chunked = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8192}  # Llama 4
    assert mean_context(65536, chunked) == (8192 + 65536) / 2 and mean_context(4096, chunked) == 4096
    mistral = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    fewer = training_flops_per_token(build_meta(tiny_model("qwen3", use_sliding_window=True, **mistral)).config, length)
    full = training_flops_per_token(build_meta(tiny_model("qwen3")).config, length)
    shape = Shape.from_fields(build_meta(tiny_model("qwen3")).config)
    saved = attention_forward_flops(shape, length) - attention_forward_flops(shape, windowed_context(length, 8))
    assert full - fewer == pytest.approx(3 * saved), "one layer of two"


def test_active_parameters_leave_out_lookups_and_idle_experts() -> None:
    model = build_meta(tiny_model("mixtral"))
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert active_matmul_parameters(model) == total - 128 * 64 - experts // 2
    tied = build_meta(tiny_model("llama", tie_word_embeddings=True))
    assert active_matmul_parameters(tied) == sum(parameter.numel() for parameter in tied.parameters())


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("Some Accelerator", None, None),
    ],
)
def test_peaks(name: str, bf16: float | None, fp32: float | None) -> None:
    assert known_gpu_peak(name, "bf16") == bf16
    assert known_gpu_peak(name, "fp32") == fp32
