"""Model FLOPs of training, and what a GPU can do at best: the two sides of MFU.

Convention (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B): a token costs 6 FLOPs a parameter that multiplies
it (2 forward, 4 backward), lookups into input embeddings excluded, of a router's experts the chosen ones only; plus
attention scores and values, 12 * layers * heads * head_dim * seq_len, halved for they are causal. Recomputation,
norms and softmax are not counted, and document boundaries inside a packed sample are not subtracted.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

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


def training_flops_per_token(config: PretrainedConfig, seq_len: int) -> float:
    """FLOPs of the forward and backward pass of one token in samples of ``seq_len``.

    Counted on a whole model of that configuration on the meta device, so whatever the caller's own was cut into.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    return 6.0 * active_matmul_parameters(whole) + attention_flops_per_token(config, seq_len)


def active_matmul_parameters(model: PreTrainedModel) -> int:
    """Parameters that a token meets in arithmetic: no lookups (a tied output head counts), chosen experts only."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    lookups = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head_weight}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0
    for name, parameter in model.named_parameters():
        if parameter in lookups:
            continue
        count = parameter.numel()
        if experts and chosen and ".experts." in name and parameter.shape[0] == experts:
            count = count * chosen // experts
        total += count
    return total


def attention_flops_per_token(config: PretrainedConfig, seq_len: int) -> float:
    """Causal scores and values, forward and backward."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 12.0 * text.num_hidden_layers * heads * head_dim * seq_len / 2
