"""FLOPs of a model's passes, and what a GPU can do at best: the two sides of MFU.

Convention (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022, appendix B): a parameter that
multiplies a token costs 2 FLOPs forward and 4 backward, 2 where it is frozen, lookups into input embeddings excluded,
of a router's experts the chosen ones only; attention scores and values are two products of the heads' whole width over,
on average, half of the document, because they are causal, or a window. Recomputation, norms and softmax do not count.
"""

from __future__ import annotations

import re
from typing import Literal

from mgpu_pipe.planner.shapes import Shape

TERA = 1e12
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
    """Peak dense FLOP/s of a GPU as ``torch.cuda.get_device_name`` calls it; None where it is not known."""
    if "Laptop" in device_name:
        return None
    for pattern, bf16, fp32 in PEAKS:
        if re.search(rf"\b{pattern}\b", device_name, re.IGNORECASE):
            peak = bf16 if dtype == "bf16" else fp32
            return None if peak is None else peak * TERA
    return None


def forward_flops(active_parameters: float) -> float:
    """Of one token through the parameters that multiply it."""
    return 2.0 * active_parameters


def attention_forward_flops(shape: Shape, context: float) -> float:
    """Of one token in one layer: causal scores and values."""
    return 2.0 * context * shape.heads * shape.head_dim


def windowed(context: float, window: int | None) -> float:
    """The length of a document in which a causal token sees as many others as in one of ``context`` behind a window."""
    return context if window is None or window >= context else 2.0 * window - window**2 / context


def training_flops_per_token(active_parameters: int, shape: Shape, context: float, frozen: int = 0) -> float:
    """Forward and backward pass of one token among ``context`` of its document; the latter costs twice the former.

    Args:
        frozen: those of the active parameters that get no gradient of their own.
    """
    both = forward_flops(active_parameters) + shape.layers * attention_forward_flops(shape, context)
    return 3.0 * both - forward_flops(frozen)
