"""Liger's Triton kernels for norms, rotary embeddings and gated feed-forward layers (Hsu et al. 2024,
arXiv:2410.10989), for blocks that are not compiled: there inductor fuses the same. The loss stays ours.

This module does not import torch, because the checks call :func:`obstacle`.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.architectures.formulas.pipeline_schedules import splits_backward
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import ModelConfig, PrecisionConfig, TrainerConfig

if TYPE_CHECKING:
    import torch


COMPILERS = ("gcc", "cc", "clang")
"""C compilers that Triton looks for, in addition to ``CC``."""


@functools.cache
def gpu_kernels_compile() -> bool:
    """Whether Triton and a C compiler, which it starts, are installed."""
    wanted = os.environ.get("CC")
    has_compiler = any(map(shutil.which, [wanted] if wanted else COMPILERS))
    return has_compiler and PathFinder.find_spec("triton") is not None


SWIGLU, GEGLU = ("silu", "swish"), ("gelu_pytorch_tanh",)
NO_GATE = ()
"""Activations of mixtures: none, because packed experts use our code (adapters, expert parallelism)."""
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
"""Liger's families compared with torch, by model type, with the activations of its feed-forward kernel. A model with
another activation keeps its feed-forward layer."""


def resolve_kernels(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, trainer: TrainerConfig, model_type: str
) -> Literal["torch", "liger"]:
    """Resolved ``model.kernels``, after ``model.compile`` is resolved; arguments as in :func:`obstacle`."""
    if model.kernels != "auto":
        return model.kernels
    return "torch" if obstacle(model, strategy, precision, trainer, model_type) else "liger"


def obstacle(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, trainer: TrainerConfig, model_type: str
) -> tuple[str, str] | None:
    """Reason why Liger's kernels cannot be used with ``model_type``, and a fix; None if they can."""
    otherwise = "use auto or torch"
    if device_type(trainer) != "cuda":
        return "they run on GPUs, and the run uses none", otherwise
    if PathFinder.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed", f"install it (pip install liger-kernel), or {otherwise}"
    if not gpu_kernels_compile():
        return "Triton or the C compiler that it starts is missing", f"install triton and gcc, or {otherwise}"
    if model_type not in FAMILIES:
        return f"they are not for {model_type}, but for {', '.join(FAMILIES)}", otherwise
    if precision.name == "fp8":
        return "float8 products pay off in compiled blocks alone", f"{otherwise}, or precision=bf16"
    if model.compile is True:
        return "model.compile=true fuses the same by itself", f"{otherwise}, or model.compile=auto or false"
    if strategy.activation_checkpointing == "selective":
        # The kernel rotates queries and keys in place; stored ones would be rotated again.
        reason = "they write into the products that strategy.activation_checkpointing=selective keeps"
        return reason, f"{otherwise}, or strategy.activation_checkpointing=full or none"
    if splits_backward(strategy):
        # They overwrite the inputs of the backward pass with gradients.
        schedule = strategy.pipeline.schedule
        reason = f"strategy.pipeline.schedule={schedule} goes back through a block twice, which they allow once"
        return reason, f"{otherwise}, or strategy.pipeline.schedule=1f1b"
    return None


def use_liger(model: Any) -> None:
    """Makes a transformers ``model`` compute by Liger's kernels, in place.

    Its norms and feed-forward layers get another ``forward`` and keep classes, names and weights. Call it before
    anything else changes the model, so that activation checkpointing, tensor parallelism, FSDP2 and DeepSpeed find
    ordinary modules. The model may be on the meta device.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config, modelling = model.config, sys.modules[type(model).__module__]
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type]
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    wanted = dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy"), False)
    wanted |= dict.fromkeys(("swiglu", "geglu"), activation in FAMILIES[config.model_type])
    # It also replaces the classes of the modelling file (LlamaRMSNorm, LlamaMLP) for all later models. Restore them.
    before, known = dict(vars(modelling)), inspect.signature(apply).parameters
    apply(model=model.base_model, **{name: value for name, value in wanted.items() if name in known})
    vars(modelling).update(before)
    # Attention looks the function up in its file, so it is replaced for all models of the family.
    modelling.apply_rotary_pos_emb = _rotary(modelling.apply_rotary_pos_emb)  # type: ignore[attr-defined]


def _rotary(plain: Any) -> Any:
    """transformers' ``apply_rotary_pos_emb`` by Liger's kernel on GPUs; rotates queries and keys in place."""
    from liger_kernel.ops import LigerRopeFunction

    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        if not on_gpu(q):
            return plain(q, k, cos, sin, unsqueeze_dim)
        return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)

    return rotary


def on_gpu(states: torch.Tensor) -> bool:
    return states.is_cuda
