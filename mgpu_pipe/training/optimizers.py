"""Optimizers: parameter groups by weight decay, and the fused kernels where torch has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mgpu_pipe.config.build import resolve_target
from mgpu_pipe.config.schema import OptimizerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.parallel.muon import Muon

FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
"""torch's optimizers that have a fused kernel on the CPU and on CUDA."""
REFUSALS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)
"""What constructors raise on values that they cannot take."""


def decay_groups(model: torch.nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices with weight decay; norms, biases and other vectors without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if config.decay_norms_and_biases:
        return [{"params": trainable, "weight_decay": config.weight_decay}]
    # A parameter that DeepSpeed has partitioned is empty, and keeps its shape in ``ds_shape``.
    num_dims = {id(p): len(getattr(p, "ds_shape", p.shape)) for p in trainable}
    groups = [
        {"params": [p for p in trainable if num_dims[id(p)] >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if num_dims[id(p)] < 2], "weight_decay": 0.0},
    ]
    # A pipeline's rank may hold frozen parameters alone; torch refuses no group, and takes an empty one.
    return [group for group in groups if group["params"]] or groups[:1]


def matrix_groups(model: torch.nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups for Muon: the hidden layers' matrices and stacks of experts' matrices; then, for AdamW, embeddings, the
    head and other matrices with weight decay, and norms, biases and other vectors without."""
    stacks = {id(p) for module in _experts(model) for p in module.parameters() if p.dim() == 3}
    apart = {id(p) for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()}
    apart |= {id(p) for p in _head(model)} | {id(p) for module in _experts(model) for p in module.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [], "matrices": matrices, "weight_decay": weight_decay}
        for matrices, weight_decay in ((True, config.weight_decay), (False, config.weight_decay), (False, 0.0))
    ]
    for p in model.parameters():
        if p.requires_grad:
            is_matrix = id(p) in stacks or (p.dim() == 2 and id(p) not in apart)
            decays = p.dim() >= 2 or config.decay_norms_and_biases
            groups[0 if is_matrix else 1 if decays else 2]["params"].append(p)
    return groups


def _experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that pack the parameters of several experts."""
    return [
        module
        for module in model.modules()
        if "expert" in type(module).__name__.lower() and any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]


def _head(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of the output head; none where it is on another pipeline stage."""
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return []
    return list(head.parameters()) if isinstance(head, torch.nn.Module) else []


def optimizer_class(target: str, lr: float, options: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """The class that ``optimizer._target_`` names, and the arguments of its constructor but the parameters.

    Raises:
        ConfigError: it is not a subclass of ``torch.optim.Optimizer``, an option is not its own, or its ``step`` wants
            to evaluate the loss.
    """
    cls, arguments = resolve_target({"_target_": target, "lr": lr, **options}, "torch.optim.Optimizer", "optimizer")
    closure = inspect.signature(getattr(cls, "step")).parameters.get("closure")  # noqa: B009
    if closure is not None and closure.default is inspect.Parameter.empty:
        reason = f"{cls.__name__} evaluates the loss itself, several times a step"
        raise ConfigError("optimizer._target_", target, "use an optimizer that takes given gradients", reason)
    return cls, arguments


def optimizer_factory(
    config: OptimizerConfig, precision: str = "fp32"
) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """A function that builds the configured optimizer of a model that is already parallelised.

    Args:
        precision: the run's; Muon computes in fp32 or bf16 by it.

    Raises:
        ConfigError: ``_target_`` is not a subclass of ``torch.optim.Optimizer`` or an option is not its own.
    """
    cls, arguments = optimizer_class(config._target_, config.lr, config.options)
    takes_decay = "weight_decay" in inspect.signature(cls).parameters
    if config.weight_decay and not takes_decay:
        raise ConfigError("optimizer.weight_decay", config.weight_decay, "use 0", f"{cls.__name__} has no weight decay")

    def build(model: torch.nn.Module) -> torch.optim.Optimizer:
        kwargs = dict(arguments)
        is_torchs = cls.__module__.startswith("torch.optim.") and cls.__name__ in FUSED
        if is_torchs and "fused" not in kwargs and not (kwargs.get("foreach") or kwargs.get("differentiable")):
            kwargs["fused"] = True
        parameters = decay_groups(model, config)
        if issubclass(cls, Muon):
            parameters = matrix_groups(model, config)
            kwargs.setdefault("precision", precision)
        if not takes_decay:
            parameters = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        try:
            return cls(parameters, **kwargs)
        except REFUSALS as error:
            reason = f"it refuses its options or this model's parameters: {' '.join(str(error).split())}"
            raise ConfigError(
                "optimizer._target_", config._target_, "change optimizer.options, or use another optimizer", reason
            ) from error

    return build
