"""AdamW whose two moments are kept in bfloat16: 4 bytes a parameter in the place of 8.

An update computes in fp32, with torch's own fused kernel, from moments that are widened for it; afterwards they are
rounded to the nearest bfloat16. So it is deterministic, and an element's update depends on that element alone: the same
under every strategy. Rounding to the nearest loses a change below 1/256 of a value, and a moment that decays by less
than that a step would never shrink; therefore betas of 0.992 and more are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

BETAS_BELOW = 1 - 2**-7
MOMENTS = ("exp_avg", "exp_avg_sq")
AT_ONCE = 1 << 24
"""Elements whose moments are widened together: 128 MiB."""

Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Weights, gradient, moments and the number of updates before this one."""


class AdamWBf16(torch.optim.Optimizer):
    """Arguments as of ``torch.optim.AdamW``.

    Raises:
        ValueError: a value that makes no sense, or a beta too near to 1.
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
            told = f"betas are not two numbers from 0 to below {BETAS_BELOW:.3f}, where bfloat16 loses a moment's decay"
            raise ValueError(f"{told}: {list(betas)}")
        if eps < 0:
            raise ValueError(f"eps is negative: {eps}")
        # torch keeps step counters where the fused kernel wants them.
        own = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(params, own)

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
        """Parts of at most ``AT_ONCE`` elements, as flat views."""
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))
            for key in MOMENTS:
                if key not in state:
                    state[key] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state[key] = state[key].to(torch.bfloat16)  # of a checkpoint of a run in another precision
            flat = [one.view(-1).split(AT_ONCE) for one in (parameter, parameter.grad, *map(state.get, MOMENTS))]
            for parts in zip(*flat, strict=True):
                yield (*parts, state["step"].clone())
            state["step"] += 1


def _update(pieces: list[Piece], group: dict[str, Any]) -> None:
    if not pieces:
        return
    *stored, steps = (list(tensors) for tensors in zip(*pieces, strict=True))
    # In fp32 at least; weights and gradients that are, are themselves.
    wide = [[tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in one] for one in stored]
    weights, gradients, averages, squares = wide
    adamw(
        weights,
        gradients,
        averages,
        squares,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for index in (0, 2, 3):
        for target, source in zip(stored[index], wide[index], strict=True):
            if target is not source:
                target.copy_(source)
