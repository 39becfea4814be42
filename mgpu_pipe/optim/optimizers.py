"""Builds optimizers: parameter groups by weight decay, and torch's fused kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mgpu_pipe.config.schema import OptimizerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.optim.groups import Treatment, treatments
from mgpu_pipe.optim.muon import ADAMW_LR, Muon
from mgpu_pipe.optim.optimizer_class import optimizer_class

FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
"""torch's optimizers with a fused kernel on the CPU and on CUDA."""
REFUSALS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)
"""Errors of constructors for invalid values."""


Groups = list[dict[str, Any]]


def decay_groups(model: torch.nn.Module, config: OptimizerConfig, treated: Mapping[str, Treatment]) -> Groups:
    """Groups of trainable parameters by treatment: first those with weight decay (matrices), then those without (norms,
    biases and other vectors)."""
    by_treatment: dict[tuple[bool, Treatment], list[torch.nn.Parameter]] = {}
    for name, p in _trained(model):
        # DeepSpeed empties a partitioned parameter and stores its shape in ``ds_shape``.
        decays = config.decay_norms_and_biases or len(getattr(p, "ds_shape", p.shape)) >= 2
        by_treatment.setdefault((not decays, treated[name]), []).append(p)
    groups = [
        {"params": params, "weight_decay": 0.0 if spared else treatment.weight_decay, **treatment.options(config.lr)}
        for (spared, treatment), params in sorted(by_treatment.items(), key=lambda item: item[0][0])
    ]
    # A pipeline's rank may have only frozen parameters; torch accepts an empty group, not an empty list.
    return groups or [{"params": [], "weight_decay": config.weight_decay}]


def matrix_groups(model: torch.nn.Module, config: OptimizerConfig, treated: Mapping[str, Treatment]) -> Groups:
    """Groups for Muon by treatment: matrices of hidden layers and stacks of experts' matrices.

    Then groups for AdamW: embeddings, head and other matrices with weight decay; norms, biases and other vectors
    without.
    """
    stacks = {id(p) for module in _experts(model) for p in module.parameters() if p.dim() == 3}
    apart = {id(p) for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()}
    apart |= {id(p) for p in _head(model)} | {id(p) for module in _experts(model) for p in module.parameters()}
    usual = Treatment(None, 1.0, config.weight_decay, 0)
    by_treatment: dict[tuple[int, Treatment], list[torch.nn.Parameter]] = {(kind, usual): [] for kind in range(3)}
    for name, p in _trained(model):
        is_matrix = id(p) in stacks or (p.dim() == 2 and id(p) not in apart)
        decays = p.dim() >= 2 or config.decay_norms_and_biases
        by_treatment.setdefault((0 if is_matrix else 1 if decays else 2, treated[name]), []).append(p)
    rates = (config.lr, *[config.options.get("adamw_lr", ADAMW_LR)] * 2)
    return [
        {
            "params": params,
            "matrices": kind == 0,
            "weight_decay": 0.0 if kind == 2 else treatment.weight_decay,
            **treatment.options(rates[kind]),
        }
        for (kind, treatment), params in sorted(by_treatment.items(), key=lambda item: item[0][0])
    ]


def _trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules with packed parameters of several experts."""
    return [
        module
        for module in model.modules()
        if "expert" in type(module).__name__.lower() and any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]


def _head(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of the output head; none if it is on another pipeline stage."""
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return []
    return list(head.parameters()) if isinstance(head, torch.nn.Module) else []


def optimizer_factory(
    config: OptimizerConfig, whole: torch.nn.Module, precision: str = "fp32"
) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """Function that builds the configured optimizer of a parallelised model.

    Args:
        whole: the model before that; its parameter names decide the groups.
        precision: the run's precision; Muon computes in fp32 or bf16 by it.

    Raises:
        ConfigError: ``_target_`` is no subclass of ``torch.optim.Optimizer``, or an option is unknown.
    """
    cls, arguments = optimizer_class(config._target_, config.lr, config.options)
    treated = treatments(whole, config)
    takes_decay = "weight_decay" in inspect.signature(cls).parameters
    if config.weight_decay and not takes_decay:
        raise ConfigError("optimizer.weight_decay", config.weight_decay, "use 0", f"{cls.__name__} has no weight decay")

    def build(model: torch.nn.Module) -> torch.optim.Optimizer:
        kwargs = dict(arguments)
        is_torchs = cls.__module__.startswith("torch.optim.") and cls.__name__ in FUSED
        if is_torchs and "fused" not in kwargs and not (kwargs.get("foreach") or kwargs.get("differentiable")):
            kwargs["fused"] = True
        groups = (matrix_groups if issubclass(cls, Muon) else decay_groups)(model, config, treated)
        if issubclass(cls, Muon):
            kwargs.setdefault("precision", precision)
        if not takes_decay:
            for group in groups:
                del group["weight_decay"]
        try:
            return cls(groups, **kwargs)
        except REFUSALS as error:
            reason = f"it refuses its options or this model's parameters: {' '.join(str(error).split())}"
            raise ConfigError(
                "optimizer._target_", config._target_, "change optimizer.options, or use another optimizer", reason
            ) from error

    return build
