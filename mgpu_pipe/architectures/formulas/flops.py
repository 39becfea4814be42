"""FLOPs of a model's passes and peak FLOP/s of GPUs, for MFU.

Convention (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022, appendix B): a parameter that
multiplies a token costs 2 FLOPs forward and 4 backward, or 2 backward if it is frozen. Lookups into input embeddings
cost nothing; of a router's experts only the chosen ones count. Attention scores and values are two products of the
heads' whole width, over half of the document on average if they are causal, or over a window. Recomputation, norms and
softmax do not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

TERA = 1e12
SLIDING = "sliding_attention"
"""Layers with a window in transformers' ``layer_types``."""
CHUNKED = "chunked_attention"
LINEAR = ("linear_attention", "mamba", "conv")
"""Layers that attend inside chunks of a document, and those without attention scores."""
PEAKS: tuple[tuple[str, float | None, float | None], ...] = (
    (r"B200", 2250, 75),
    (r"GH200", 989.4, 67),
    (r"H200 NVL", 835.5, 60),
    (r"H200", 989.4, 67),
    (r"H100 NVL", 835.5, 60),
    (r"H100 PCIe", 756, 51),
    (r"H100", 989.4, 67),
    (r"A100", 312, 19.5),
    (r"L40S", 362, 91.6),
    (r"L40", 181, 90.5),
    (r"L4", 121, 30.3),
    (r"A40", 149.7, 37.4),
    (r"A10", 125, 31.2),
    (r"RTX A6000", 154.8, 38.7),
    (r"RTX 4090(?! D)", 165.2, 82.6),
    (r"RTX 3090", 71, 35.6),
    (r"V100-PCIE", None, 14),
    (r"V100", None, 15.7),
    (r"T4", None, 8.1),
)
"""(device name, bf16 with fp32 accumulation, fp32 without TF32) in TFLOP/s, dense, from NVIDIA's data sheets."""


def known_gpu_peak(device_name: str, dtype: Literal["bf16", "fp32"]) -> float | None:
    """Peak dense FLOP/s of a GPU by its ``torch.cuda.get_device_name``; None if unknown."""
    if "Laptop" in device_name:
        return None
    for pattern, bf16, fp32 in PEAKS:
        if re.search(rf"\b{pattern}\b", device_name, re.IGNORECASE):
            peak = bf16 if dtype == "bf16" else fp32
            return None if peak is None else peak * TERA
    return None


def forward_flops(active_parameters: float) -> float:
    """Forward FLOPs of one token through the parameters that multiply it."""
    return 2.0 * active_parameters


def attention_forward_flops(shape: Shape, context: float) -> float:
    """Forward FLOPs of one token in one layer: causal scores and values."""
    return 2.0 * context * shape.heads * shape.head_dim


def windowed_context(context: float, window: int | None) -> float:
    """Document length in which causal tokens see as many others as in ``context`` with a window."""
    return context if window is None or window >= context else 2.0 * window - window**2 / context


def window_of(fields: Mapping[str, Any]) -> int | None:
    """The sliding window of some layer of a model's configuration, in tokens; None if no layer has a window."""
    window, layers = fields.get("sliding_window"), fields.get("layer_types")
    used = fields.get("use_sliding_window", True) and (not layers or SLIDING in layers)
    return window if used and isinstance(window, int) and window > 0 else None


def mean_context(context: float, fields: Mapping[str, Any]) -> float:
    """Mean over the layers of the context that attention sees, by ``layer_types``: the sliding ones have the window,
    chunked ones their chunk, and linear ones have no scores. Without types all layers have the window."""
    chunk = fields.get("attention_chunk_size")
    contexts = {SLIDING: windowed_context(context, window_of(fields)), CHUNKED: min(context, float(chunk or context))}
    contexts.update(dict.fromkeys(LINEAR, 0.0))
    layers = fields.get("layer_types") or [SLIDING]
    return float(sum(contexts.get(kind, context) for kind in layers) / len(layers))


def training_flops_per_token(active_parameters: int, shape: Shape, context: float, frozen: int = 0) -> float:
    """FLOPs of forward and backward pass (twice forward) of one token among ``context``; ``frozen`` parameters have no
    gradient."""
    both = forward_flops(active_parameters) + shape.layers * attention_forward_flops(shape, context)
    return 3.0 * both - forward_flops(frozen)


@dataclass(frozen=True)
class Shape:
    """Width, layers and attention heads of a decoder."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int

    @classmethod
    def from_fields(cls, fields: Any) -> Shape:
        """Shape from a configuration's standard fields: a mapping, or transformers' text configuration."""

        def read(name: str) -> Any:
            return fields.get(name) if isinstance(fields, Mapping) else getattr(fields, name, None)

        width, heads = read("hidden_size"), read("num_attention_heads") or 1
        shares_a_head = read("multi_query") and not read("new_decoder_architecture")  # Falcon and GPT-BigCode
        latent = latent_widths(read)
        return cls(
            width=width,
            layers=read("num_hidden_layers"),
            heads=heads,
            key_value_heads=1 if shares_a_head else read("num_key_value_heads") or read("num_kv_heads") or heads,
            head_dim=sum(latent) // 2 if latent else read("head_dim") or width // heads,
        )


def latent_widths(read: Callable[[str], Any]) -> tuple[int, int, int] | None:
    """Widths of a head's plain and rotated queries and of its values in latent attention; None for another attention.

    Args:
        read: returns a field of the configuration, or None. MiniCPM3's null width of values is a share of the model's.
    """
    plain, rotated, values = (read(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if not isinstance(read("kv_lora_rank"), int) or None in (plain, rotated):
        return None
    return plain, rotated, values or read("hidden_size") // read("num_attention_heads")
