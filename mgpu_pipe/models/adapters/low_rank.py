"""LoRA: a low-rank product, trained beside a frozen linear layer (Hu et al. 2021, arXiv:2106.09685).

A linear layer becomes a LoRA layer by its class, so its weight keeps its name: plans, recipes and checkpoints see a
layer with two more parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.config.peft import PeftConfig

A, B = "lora_A", "lora_B"
"""Parameters of shapes (rank, inputs) and (outputs, rank), also beside a weight that is stored transposed."""


class LoraLayer(nn.Module):
    """The parts that all adapted linear layers share."""

    OWN: tuple[str, ...] = (A, B)
    """Names of the adapter's parameters."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: nn.Module | None
    adapts: bool = True
    """Off: the layer is as it is without its adapter."""

    def adapt(self, keys: PeftConfig, inputs: int, outputs: int, **like: Any) -> None:
        """Give the layer, whose class is this one already, its adapter, which changes nothing yet."""
        self.lora_A = nn.Parameter(torch.empty(keys.r, inputs, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.lora_B = nn.Parameter(torch.zeros(outputs, keys.r, **like))
        self.lora_scale = keys.scale
        self.lora_dropout = nn.Dropout(keys.dropout) if keys.dropout else None

    def rows(self) -> torch.Tensor:
        """The frozen weight as (outputs, inputs)."""
        weight: Any = self.weight
        rows: torch.Tensor = weight.t() if isinstance(self, Conv1D) else weight
        return rows

    def low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds, of shape (..., outputs)."""
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        return F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.lora_scale

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result without its bias."""
        plain = F.linear(x, self.rows())
        return plain + self.low_rank(x) if self.adapts else plain

    @classmethod
    def merge(cls, rows: torch.Tensor, scale: float, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight (outputs, inputs) that gives by itself what ``rows`` gives with the adapter ``own``."""
        return rows + (own[B] @ own[A]) * scale


class LoraLinear(LoraLayer, nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = nn.Linear.forward(self, x)
        return plain + self.low_rank(x) if self.adapts else plain


class LoraConv1D(LoraLayer, Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = Conv1D.forward(self, x)
        return plain + self.low_rank(x) if self.adapts else plain
