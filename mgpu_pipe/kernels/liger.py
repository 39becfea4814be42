"""Norms, rotary embeddings and gated feed-forward layers by Liger's Triton kernels (Hsu et al. 2024,
arXiv:2410.10989), for blocks that are not compiled: in those inductor fuses the same by itself. The loss stays our own.

No torch at import: the checks read what stands in the way.
"""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.kernels.compiled import gpu_kernels_compile

if TYPE_CHECKING:
    import torch

SWIGLU, GEGLU = ("silu", "swish"), ("gelu_pytorch_tanh",)
NO_GATE = ()
"""Of mixtures: their experts, which are packed in one module, are our own (adapters, expert parallelism)."""
FAMILIES: dict[str, tuple[str, ...]] = {
    "exaone4": SWIGLU,
    "gemma": GEGLU,
    "gemma2": GEGLU,
    "gemma3_text": GEGLU,
    "granite": SWIGLU,
    "hunyuan_v1_dense": SWIGLU,
    "llama": SWIGLU,
    "ministral": SWIGLU,
    "mistral": SWIGLU,
    "mixtral": NO_GATE,
    "olmo2": SWIGLU,
    "olmo3": SWIGLU,
    "phi3": SWIGLU,
    "qwen2": SWIGLU,
    "qwen3": SWIGLU,
    "qwen3_moe": NO_GATE,
    "smollm3": SWIGLU,
}
"""Those of Liger's families that were compared with torch, by model type; and the activation that its kernel of the
feed-forward layer computes. A model that was given another one keeps its own feed-forward layer."""


def kernels_of(config: RunConfig, model_type: str, splits_backward: bool) -> Literal["torch", "liger"]:
    """What ``model.kernels`` means, once ``model.compile`` is true or false; arguments as of :func:`obstacle`."""
    if config.model.kernels != "auto":
        return config.model.kernels
    return "torch" if obstacle(config, model_type, splits_backward) else "liger"


def obstacle(config: RunConfig, model_type: str, splits_backward: bool) -> tuple[str, str] | None:
    """Why Liger's kernels cannot be used, and what else to write than ``model.kernels=liger``; None where they can.

    Args:
        model_type: of the model's configuration.
        splits_backward: a pipeline computes gradients of inputs and of weights apart.
    """
    otherwise = "use auto or torch"
    if device_type(config) != "cuda":
        return "they run on GPUs, and the run uses none", otherwise
    if PathFinder.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed", f"install it (pip install liger-kernel), or {otherwise}"
    if not gpu_kernels_compile():
        return "Triton or the C compiler that it starts is missing", f"install triton and gcc, or {otherwise}"
    if model_type not in FAMILIES:
        return f"they are not for {model_type}, but for {', '.join(FAMILIES)}", otherwise
    if config.precision.name == "fp8":
        return "float8 products pay off in compiled blocks alone", f"{otherwise}, or precision=bf16"
    if config.model.compile is True:
        return "model.compile=true fuses the same by itself", f"{otherwise}, or model.compile=auto or false"
    if config.strategy.activation_checkpointing == "selective":
        # Queries and keys are turned in place; those that were kept would be turned again.
        reason = "they write into the products that strategy.activation_checkpointing=selective keeps"
        return reason, f"{otherwise}, or strategy.activation_checkpointing=full or none"
    if splits_backward:
        # They write gradients over what the backward pass was given.
        schedule = config.strategy.pipeline.schedule
        reason = f"strategy.pipeline.schedule={schedule} goes back through a block twice, which they allow once"
        return reason, f"{otherwise}, or strategy.pipeline.schedule=1f1b"
    return None


def use_liger(model: Any) -> None:
    """Have a ``model`` of transformers compute by Liger's kernels, in place: its norms and feed-forward layers get
    another ``forward``, and keep their classes, names and weights.

    Called before anything else changes the model: activation checkpointing, tensor parallelism, FSDP2 and DeepSpeed
    then find modules like any others. The model may be on the meta device.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config, modelling = model.config, sys.modules[type(model).__module__]
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type]
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    wanted = dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy"), False)
    wanted |= dict.fromkeys(("swiglu", "geglu"), activation in FAMILIES[config.model_type])
    # Beside the modules of this model it replaces the classes of its modelling file (LlamaRMSNorm, LlamaMLP), for all
    # models that are made later. Those are given back.
    before, known = dict(vars(modelling)), inspect.signature(apply).parameters
    apply(model=model.base_model, **{name: value for name, value in wanted.items() if name in known})
    vars(modelling).update(before)
    # Attention finds the function in its file alone, so this one is replaced for all models of the family.
    modelling.apply_rotary_pos_emb = _rotary(modelling.apply_rotary_pos_emb)  # type: ignore[attr-defined]


def _rotary(plain: Any) -> Any:
    """transformers' ``apply_rotary_pos_emb``, by Liger's kernel on GPUs. It turns queries and keys in place."""
    from liger_kernel.ops import LigerRopeFunction

    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        if not on_gpu(q):
            return plain(q, k, cos, sin, unsqueeze_dim)
        return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)

    return rotary


def on_gpu(states: torch.Tensor) -> bool:
    return states.is_cuda
