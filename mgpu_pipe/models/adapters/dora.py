"""DoRA: a low-rank product gives a weight's direction, a vector the length of its rows (Liu et al. 2024,
arXiv:2402.09353, with its section 4.3: no gradient goes through the rows' length).

The vector is kept as what it differs by from the frozen rows' own lengths. So it begins at zero, whatever the weights
are and wherever they lie, and its gradients are those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.config.peft import PeftConfig
from mgpu_pipe.models.adapters.low_rank import A, B, LoraLayer

MAGNITUDE = "lora_magnitude"
"""A parameter of shape (outputs,)."""


class DoraLayer(LoraLayer):
    OWN = (A, B, MAGNITUDE)
    lora_magnitude: nn.Parameter
    norm_group: dist.ProcessGroup | None = None
    """The ranks that each hold some inputs of the weight's rows."""

    def adapt(self, keys: PeftConfig) -> None:
        super().adapt(keys)
        self.lora_magnitude = nn.Parameter(torch.zeros_like(self.lora_B[:, 0]))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        plain = super().product(x)
        if not self.adapts:
            return plain
        own = {name: getattr(self, name) for name in self.OWN}
        return plain * _factors(self.rows(), self.lora_scale, own, self.norm_group).to(plain.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias: Any = self.bias
        return self.product(x) if bias is None else self.product(x) + bias

    @classmethod
    def merge(cls, rows: torch.Tensor, scale: float, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().merge(rows, scale, own) * _factors(rows, scale, own).unsqueeze(1).to(rows.dtype)


class DoraLinear(DoraLayer, nn.Linear):
    pass


class DoraConv1D(DoraLayer, Conv1D):
    pass


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """Lengths of the rows of (outputs, inputs), in fp32 at least."""
    return _squares(rows).sqrt()


def _factors(
    rows: torch.Tensor, scale: float, own: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """What each output is multiplied by: exactly 1 at the beginning."""
    with torch.no_grad():
        squares = torch.stack([_squares(rows), _squares(LoraLayer.merge(rows, scale, own))])
        if group is not None:
            dist.all_reduce(squares, group=group)
        before, now = squares.sqrt()
        now.clamp_min_(torch.finfo(now.dtype).tiny)  # a row of zeros stays one
    return (before + own[MAGNITUDE]) / now


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(1)
