"""Builds optimizers and learning-rate schedules: parameter groups with their treatment by name, torch's fused kernels.

Names are those of the whole model; a rank's parameters, cut or not, keep them. A schedule is a pure function of the
optimizer step, so a resume needs no state of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from mgpu_pipe.config.group_keys import OptimizerConfig, ParameterGroup
from mgpu_pipe.config.schema import SchedulerConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.model_parts import named_parts
from mgpu_pipe.models.shard_units import decoder_blocks
from mgpu_pipe.optim.muon import ADAMW_LR, Muon
from mgpu_pipe.optim.probe import optimizer_class

FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
"""torch's optimizers with a fused kernel on the CPU and on CUDA."""
REFUSALS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)
"""Errors of constructors for invalid values."""

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Treatment:
    """Training of a parameter. Its learning rate is ``lr``, or the optimizer's times ``lr_factor``."""

    lr: float | None
    lr_factor: float
    weight_decay: float
    frozen_until: int

    def options(self, lr: float) -> dict[str, Any]:
        """Options of the optimizer's group that differ from its defaults, with the learning rate ``lr``."""
        group_lr = lr * self.lr_factor if self.lr is None else self.lr
        start = {"frozen_until": self.frozen_until} if self.frozen_until else {}
        return {**({} if group_lr == lr else {"lr": group_lr}), **start}


def treatments(model: torch.nn.Module, config: OptimizerConfig) -> dict[str, Treatment]:
    """Treatments of all trained parameters of the whole ``model``, by every name.

    A tied parameter has several names, of which the first decides; a pipeline may have copies under each.

    Raises:
        ConfigError: a pattern matches no parameter, or a group has no trained one.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    patterns = {name: named_parts(model, group.parameters) for name, group in config.groups.items()}
    for name, several in patterns.items():
        _check_patterns(name, several, list(named))
    factors = _layer_factors(model, config.layer_decay)
    chosen_treatments, used = {}, set()
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        chosen = _group_of(parameter_name, patterns)
        group = ParameterGroup() if chosen is None else config.groups[chosen]
        used.add(chosen)
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        factor = factors.get(parameter_name, 1.0) if group.lr is None else 1.0
        chosen_treatments[parameter_name] = Treatment(group.lr, factor, decay, group.frozen_until)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen_treatments = {
        name: chosen_treatments[first[id(parameter)]]
        for name, parameter in named.items()
        if first[id(parameter)] in chosen_treatments
    }
    for name, group in config.groups.items():
        if name not in used:
            reason = "it is left without a trained parameter: each is frozen, or belongs to a group above"
            raise ConfigError(f"optimizer.groups.{name}.parameters", group.parameters, "change its patterns", reason)
    return chosen_treatments


def _check_patterns(name: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    key = f"optimizer.groups.{name}.parameters"
    if not patterns:
        raise ConfigError(key, [], f"name some, such as [{names[0]}]", "the group names no parameter")
    for pattern in patterns:
        if not any(fnmatchcase(parameter, pattern) for parameter in names):
            close = nearest(pattern, names)
            fix = f"did you mean {close}?" if close else f"use names like {names[0]}"
            raise ConfigError(key, pattern, fix, "matches no parameter of the model")


def _group_of(parameter: str, groups: Mapping[str, Sequence[str]]) -> str | None:
    """First group with a pattern that matches the parameter, or None."""
    for name, patterns in groups.items():
        if any(fnmatchcase(parameter, pattern) for pattern in patterns):
            return name
    return None


def _layer_factors(model: torch.nn.Module, decay: float) -> dict[str, float]:
    """Factors of layer-wise decay on the learning rate by parameter, without factors of 1.

    A tower of n blocks has ``decay**1`` in its last block and ``decay**n`` in its first. Modules before its blocks
    (embeddings, a vision model's patches) have ``decay**(n + 1)``. Modules after them (norm, head) have none.
    """
    if decay == 1.0:
        return {}
    blocks = {id(block) for block in decoder_blocks(model)}
    powers: dict[int, int] = {}

    def visit(module: torch.nn.Module) -> int:
        """Number of blocks of the tallest tower in ``module``."""
        tower = [child for child in module.children() if id(child) in blocks]
        for power, block in enumerate(reversed(tower), 1):
            powers.update((id(parameter), power) for parameter in block.parameters())
        tallest, before = len(tower), list[torch.nn.Module]()
        for child in () if tower else module.children():
            height = visit(child)
            if height:
                lowest = ((id(parameter), height + 1) for below in before for parameter in below.parameters())
                powers.update(lowest)
                before.clear()
            else:
                before.append(child)
            tallest = max(tallest, height)
        return tallest

    visit(model)
    named = model.named_parameters()
    return {name: decay ** powers[id(parameter)] for name, parameter in named if id(parameter) in powers}


def decay_groups(model: torch.nn.Module, config: OptimizerConfig, treated: Mapping[str, Treatment]) -> Groups:
    """Groups of trainable parameters by treatment: first those with weight decay (matrices), then those without (norms,
    biases and other vectors)."""
    by_treatment: dict[tuple[bool, Treatment], list[torch.nn.Parameter]] = {}
    for name, p in _trained_parameters(model):
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
    for name, p in _trained_parameters(model):
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


def _trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
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


WSD_DECAY_SHARE = 0.1


def build_schedule(config: SchedulerConfig, total_steps: int) -> Callable[[int], float]:
    """Function that returns the factor of the peak learning rate at a zero-based optimizer step.

    After ``warmup`` steps of linear warm-up (step 0 takes ``1 / warmup`` of the peak): ``constant``;
    ``linear`` or ``cosine`` (Loshchilov and Hutter 2017, arXiv:1608.03983) down to ``min_lr_ratio`` at the horizon;
    ``wsd`` (Hu et al. 2024, arXiv:2404.06395): stable, then linear over the last ``decay_steps``. Steps beyond the
    horizon keep the final value.
    """
    warmup, floor = config.warmup(total_steps), config.min_lr_ratio
    decay = config.decay_steps if config.decay_steps is not None else max(1, round(total_steps * WSD_DECAY_SHARE))

    def share_left(step: int, start: int) -> float:
        span = max(1, total_steps - start)
        return min(1.0, max(0.0, (total_steps - step) / span))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.name == "constant":
            return 1.0
        if config.name == "wsd":
            return floor + (1 - floor) * share_left(step, max(warmup, total_steps - decay))
        left = share_left(step, warmup)
        if config.name == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
        return floor + (1 - floor) * left

    return factor
