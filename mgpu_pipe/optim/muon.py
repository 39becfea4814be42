"""Muon for a model's matrices, AdamW for everything else, also for sharded matrices.

Muon's update is the (semi-)orthogonal matrix nearest to the momentum, by Newton-Schulz (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). It needs whole matrices: see :mod:`.whole_matrices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from mgpu_pipe.optim.adamw_bf16 import fused_adamw

Matrix = Callable[[torch.Tensor], torch.Tensor]
"""Function of a whole matrix that returns another of its shape."""
ADJUSTMENTS = (None, "original", "match_rms_adamw")
ADAMW_LR = 3e-4
"""Default learning rate of parameters that are no matrices."""
MOST_STEPS = 99


class Orthogonalise(Protocol):
    """Applies a function to whole matrices, of each of which a rank may hold a part."""

    def shape(self, index: int) -> torch.Size:
        """Shape of a matrix of the whole parameter."""

    def __call__(self, parts: list[torch.Tensor | None], function: Matrix, dtype: torch.dtype) -> list[torch.Tensor]:
        """This rank's parts of the results, in ``dtype``. A collective call."""


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest; its results are those of torch.optim.Muon and torch.optim.AdamW.

    Args:
        params: groups; ``matrices`` decides their update. Without it parameters of two dims are matrices. In a group of
            matrices each parameter has two dims, or three: a stack of matrices.
        lr: learning rate of the matrices.
        momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn: as in torch.optim.Muon.
        adamw_lr, adamw_betas, adamw_eps: settings of the rest.
        precision: ``fp32`` makes Newton-Schulz compute in fp32, else in bf16.

    Attributes:
        cut: assembles the sharded matrices of each group that has matrices; empty if they are whole.

    Raises:
        ValueError: an invalid value.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-2,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        adamw_lr: float = ADAMW_LR,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        precision: str = "fp32",
    ) -> None:
        for name, value in (("momentum", momentum), ("eps", eps), ("adamw_lr", adamw_lr), ("adamw_eps", adamw_eps)):
            if value < 0:
                raise ValueError(f"{name} is negative: {value}")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients are three numbers, not {len(ns_coefficients)}")
        if not 1 <= int(ns_steps) == ns_steps <= MOST_STEPS:
            raise ValueError(f"ns_steps is not a number from 1 to {MOST_STEPS}: {ns_steps}")
        if adjust_lr_fn not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn is neither original nor match_rms_adamw: {adjust_lr_fn}")
        if len(adamw_betas) != 2 or not all(0 <= beta < 1 for beta in adamw_betas):
            raise ValueError(f"adamw_betas are not two numbers from 0 to below 1: {list(adamw_betas)}")
        self.cut: Sequence[Orthogonalise] = ()
        self._dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        shared = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "ns_steps": ns_steps,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_betas": tuple(adamw_betas),
            "adamw_eps": adamw_eps,
        }
        groups = [part for group in _groups(params) for part in _split_group(group)]
        rates = [{"lr": group.get("lr", lr if group["matrices"] else adamw_lr)} for group in groups]
        # With ``fused`` torch keeps step counters on the device.
        fused = [{} if group["matrices"] else {"fused": True} for group in groups]
        super().__init__(
            [{**group, **rate, **flag} for group, rate, flag in zip(groups, rates, fused, strict=True)],
            {"lr": lr, "weight_decay": weight_decay, **shared},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups_of_matrices = [group for group in self.param_groups if group["matrices"]]
        for index, group in enumerate(groups_of_matrices):
            self._update_matrices(group, self.cut[index] if self.cut else _Whole(group["params"]))
        for group in self.param_groups:
            if not group["matrices"]:
                self._update_others(group)
        return loss

    def _update_matrices(self, group: dict[str, Any], how: Orthogonalise) -> None:
        parameters: list[torch.Tensor] = group["params"]
        directions: list[torch.Tensor | None] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                directions.append(None)
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum: torch.Tensor = state["momentum_buffer"]
            momentum.lerp_(gradient, 1 - group["momentum"])
            directions.append(gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)

        def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
            return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"], self._dtype)

        updates = how(directions, orthogonal, self._dtype)
        for index, (parameter, direction) in enumerate(zip(parameters, directions, strict=True)):
            if direction is None:
                continue
            rate = group["lr"] * adjustment(group["adjust_lr_fn"], how.shape(index))
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(updates[index], alpha=-rate)

    def _update_others(self, group: dict[str, Any]) -> None:
        present = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in present:
            if not self.state[parameter]:
                self.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )
        states = [self.state[parameter] for parameter in present]
        averages, squares, steps = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        if present:
            gradients, betas, eps = [parameter.grad for parameter in present], group["adamw_betas"], group["adamw_eps"]
            fused_adamw(present, gradients, averages, squares, steps, betas, group["lr"], group["weight_decay"], eps)


def newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Approximation of U V^T of ``matrix`` = U S V^T by torch.optim.Muon's quintic iteration, in ``dtype``."""
    a, b, c = coefficients
    iterate = matrix.to(dtype)
    tall = matrix.shape[0] > matrix.shape[1]
    if tall:
        iterate = iterate.T
    iterate = iterate / iterate.norm().clamp(min=eps)
    for _ in range(steps):
        gram = iterate @ iterate.T
        iterate = torch.addmm(iterate, torch.addmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.T if tall else iterate


def adjustment(how: str | None, shape: torch.Size) -> float:
    """torch.optim.Muon's factor of the learning rate for a matrix of ``shape``."""
    if how == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))


class _Whole:
    """:class:`Orthogonalise` for matrices that are whole on this rank."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters

    def shape(self, index: int) -> torch.Size:
        return self._parameters[index].shape[-2:]

    def __call__(self, parts: list[torch.Tensor | None], function: Matrix, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.empty(0) if part is None else each_matrix(part, function, dtype) for part in parts]


def each_matrix(tensor: torch.Tensor, function: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """``function`` of a matrix, or of each in a stack; empty ones stay unchanged."""
    result = torch.empty_like(tensor, dtype=dtype)
    pairs = [(result, tensor)] if tensor.dim() == 2 else zip(result, tensor, strict=True)
    for target, matrix in pairs:
        if matrix.numel():
            target.copy_(function(matrix))
    return result


def _groups(params: Any) -> list[dict[str, Any]]:
    groups = list(params)
    return groups if groups and isinstance(groups[0], dict) else [{"params": groups}]


def _split_group(group: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The group, or without ``matrices`` one of its matrices and one of the rest."""
    parameters = group["params"]
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if "matrices" in group:
        return [{**group, "params": parameters}]
    return [
        {**group, "params": [p for p in parameters if (p.dim() == 2) is chosen], "matrices": chosen}
        for chosen in (True, False)
    ]
