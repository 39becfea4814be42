"""Optimizers as users write them, each with one habit."""

from __future__ import annotations

from typing import Any

import torch


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.begin()

    def begin(self) -> None:
        """Of the constructor."""

    def parameters(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        return [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter in self.parameters():
            update = self.update(self.state[parameter], parameter.grad)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        raise NotImplementedError


class Counting(Own):
    """Elementwise; its state holds Python's numbers beside a tensor, and it replaces the parameters' tensors."""

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        if not state:
            state.update(step=0, scale=1.0, momentum=torch.zeros_like(gradient), nothing=None)
        state["step"] += 1
        state["scale"] *= 0.9
        state["momentum"] = 0.9 * state["momentum"] + state["scale"] / state["step"] * gradient
        return torch.tanh(state["momentum"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter in self.parameters():
            parameter.data = parameter.data - group["lr"] * self.update(self.state[parameter], parameter.grad)


class Lion(Own):
    """Elementwise (Chen et al. 2023), all in place."""

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        if not state:
            state.update(step=0, average=torch.zeros_like(gradient))
        state["step"] += 1
        update = torch.tanh(100 * torch.lerp(gradient, state["average"], 0.9))  # a sign that rounding does not turn
        state["average"].lerp_(gradient, 0.01)
        return update


class ByNorm(Own):
    """A tensor's update has the norm 1."""

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        return gradient / gradient.norm()


class Clipping(Own):
    """All updates together have the norm 1."""

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        norms = [p.grad.norm() for _, p in self.parameters() if p.grad is not None]
        return gradient / torch.stack(norms).norm()


class Noisy(Own):
    """Langevin dynamics."""

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Remembering(Own):
    """Counts its steps outside of the state."""

    def begin(self) -> None:
        self.steps = 0

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        self.steps += 1
        return gradient / self.steps


class Listing(Own):
    """Keeps the last gradients in a list."""

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        state.setdefault("last", []).append(gradient.clone())
        return torch.stack(state["last"][-3:]).mean(0)


class Early(Own):
    """Its constructor makes the state."""

    def begin(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)

    def update(self, state: dict[str, Any], gradient: Any) -> torch.Tensor:
        state["sum"] += gradient.square()
        return gradient / (state["sum"].sqrt() + 1e-8)
