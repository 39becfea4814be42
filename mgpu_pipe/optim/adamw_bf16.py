"""AdamW with two moments in bfloat16: 4 bytes per parameter instead of 8.

An update widens the moments, computes in fp32 with torch's fused kernel, and rounds them to the nearest bfloat16. So it
is deterministic and element-wise: equal under every strategy. Rounding loses a change below 1/256 of a value, and a
moment that decays by less per step would never shrink. Therefore betas of 0.992 and more are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

BETAS_BELOW = 1 - 2**-7
MOMENTS = ("exp_avg", "exp_avg_sq")
AT_ONCE = 1 << 24
"""Number of elements whose moments are widened at a time: 128 MiB."""

Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Weights, gradient, moments and number of earlier updates."""


class AdamWBf16(torch.optim.Optimizer):
    """AdamW with bfloat16 moments; arguments as in ``torch.optim.AdamW``.

    Raises:
        ValueError: an invalid value, or a beta too close to 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        if len(betas) != 2 or not all(0 <= beta < BETAS_BELOW for beta in betas):
            problem = (
                f"betas are not two numbers from 0 to below {BETAS_BELOW:.3f}, where bfloat16 loses a moment's decay"
            )
            raise ValueError(f"{problem}: {list(betas)}")
        if eps < 0:
            raise ValueError(f"eps is negative: {eps}")
        # With ``fused`` torch keeps step counters on the device.
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: list[Piece] = []
            elements = 0
            for piece in self._pieces(group["params"]):
                together.append(piece)
                elements += piece[0].numel()
                if elements >= AT_ONCE:
                    _update(together, group)
                    together, elements = [], 0
            _update(together, group)
        return loss

    def _pieces(self, parameters: list[torch.Tensor]) -> Iterator[Piece]:
        """Pieces of at most ``AT_ONCE`` elements, as flat views."""
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))
            for key in MOMENTS:
                if key not in state:
                    state[key] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state[key] = state[key].to(torch.bfloat16)  # a checkpoint may have another precision
            tensors = (parameter, parameter.grad, *map(state.get, MOMENTS))
            flat = [tensor.view(-1).split(AT_ONCE) for tensor in tensors]
            for parts in zip(*flat, strict=True):
                yield (*parts, state["step"].clone())
            state["step"] += 1


def _update(pieces: list[Piece], group: dict[str, Any]) -> None:
    if not pieces:
        return
    *stored, steps = (list(tensors) for tensors in zip(*pieces, strict=True))
    # At least fp32; weights and gradients in fp32 are not copied.
    wide = [[tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors] for tensors in stored]
    weights, gradients, averages, squares = wide
    betas, eps = group["betas"], group["eps"]
    fused_adamw(weights, gradients, averages, squares, steps, betas, group["lr"], group["weight_decay"], eps)
    for index in (0, 2, 3):
        for target, source in zip(stored[index], wide[index], strict=True):
            if target is not source:
                target.copy_(source)


def fused_adamw(
    weights: list[torch.Tensor],
    gradients: list[Any],
    averages: list[torch.Tensor],
    squares: list[torch.Tensor],
    steps: list[torch.Tensor],
    betas: tuple[float, float],
    lr: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Updates ``weights``, their moments and the numbers of updates in place, by torch's fused AdamW."""
    rates: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
    settings: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "amsgrad": False, "maximize": False, **rates}
    adamw(weights, gradients, averages, squares, [], steps, fused=True, **settings)
