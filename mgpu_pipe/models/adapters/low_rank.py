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


class Adapted(nn.Module):
    """A module with adapters, whose class tells what kind they are and is the module's own class besides."""

    lora_scale: float
    lora_dropout: nn.Module | None
    adapts: bool = True
    """Off: the module is as it is without its adapters."""

    def adapted(self) -> dict[str, dict[str, str]]:
        """For each adapted weight the names of its adapter's parameters, by what they are."""
        raise NotImplementedError

    def adapt(self, keys: PeftConfig) -> None:
        """Give the module, whose class is this one already, its adapters, which change nothing yet."""
        raise NotImplementedError

    def rows(self, name: str = "weight") -> torch.Tensor:
        """A frozen weight as (..., outputs, inputs)."""
        return as_rows(self, getattr(self, name))

    @classmethod
    def merge(cls, rows: torch.Tensor, scale: float, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight (..., outputs, inputs) that gives by itself what ``rows`` gives with the adapter ``own``."""
        return rows + (own[B] @ own[A]) * scale


def as_rows(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` as (..., outputs, inputs) from the form in which ``module`` stores it, and back."""
    return weight.mT if isinstance(module, Conv1D) or module.__dict__.get("is_transposed") else weight


class LoraLayer(Adapted):
    """What all adapted linear layers share."""

    OWN: tuple[str, ...] = (A, B)
    """Names of the adapter's parameters."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def adapted(self) -> dict[str, dict[str, str]]:
        return {"weight": {name: name for name in self.OWN}}

    def adapt(self, keys: PeftConfig) -> None:
        weight = self.rows()
        like: Any = {"dtype": weight.dtype, "device": weight.device}
        outputs, inputs = weight.shape
        self.lora_A = nn.Parameter(torch.empty(keys.r, inputs, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.lora_B = nn.Parameter(torch.zeros(outputs, keys.r, **like))

    def low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds, of shape (..., outputs)."""
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        return F.linear(F.linear(dropped, self.lora_A) * self.lora_scale, self.lora_B)  # scaled where it is narrow

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """The frozen weight's part of the result."""
        return F.linear(x, self.rows())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result without its bias."""
        plain = self.dense(x)
        return plain + self.low_rank(x) if self.adapts else plain


class LoraLinear(LoraLayer, nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = nn.Linear.forward(self, x)
        return plain + self.low_rank(x) if self.adapts else plain


class LoraConv1D(LoraLayer, Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = Conv1D.forward(self, x)
        return plain + self.low_rank(x) if self.adapts else plain
