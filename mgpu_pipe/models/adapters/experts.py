"""LoRA beside the packed weights of experts, (experts, outputs, inputs) each: every expert has a product of its own.

The module's own forward pass looks at its weights only, so it is replaced by one that does the same for rows that are
ordered by expert, as transformers' ``grouped_mm`` does: no product is ever added to a weight, and weights may be bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mgpu_pipe.compat.transformers_private import gated
from mgpu_pipe.config.peft import PeftConfig
from mgpu_pipe.models.adapters.low_rank import A, Adapted, B, as_rows

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""What transformers calls packed weights."""
ALIGNED = 16
"""Bytes that a row has to be a multiple of for torch's grouped product."""


class GroupedExperts(nn.Module):
    """Packed experts whose rows are computed in the order of their experts."""

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Shapes (tokens, width), (tokens, top_k), (tokens, top_k); returns (tokens, width)."""
        module: Any = self
        experts = top_k_index.reshape(-1)
        order = torch.argsort(experts, stable=True)
        experts = experts[order]
        number = next(self.parameters()).shape[0]
        ends = torch.bincount(experts, minlength=number).cumsum(0)
        rows = hidden[order // top_k_index.shape[1]]
        inner = self._through(WEIGHTS[0] if module.has_gate else WEIGHTS[1], rows, experts, ends)
        inner = gated(module, inner) if module.has_gate else module.act_fn(inner)
        outputs = self._through(WEIGHTS[2], inner, experts, ends)
        weighted = outputs * top_k_weights.reshape(-1)[order].unsqueeze(1)
        result = torch.empty_like(weighted).index_copy(0, order, weighted)
        return result.view(*top_k_index.shape, -1).sum(1).to(hidden.dtype)

    def _through(self, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        result = self.product(name, rows, ends)
        bias = getattr(self, f"{name}_bias", None)
        return result if bias is None else result + bias[experts]

    def product(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.dense(name, rows, ends)

    def dense(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The frozen weights' part of the result for rows in groups that end at ``ends``."""
        return _grouped(rows, as_rows(self, getattr(self, name)), ends)


class LoraExperts(GroupedExperts, Adapted):
    def adapted(self) -> dict[str, dict[str, str]]:
        return {name: {one: f"{name}_{one}" for one in (A, B)} for name in WEIGHTS if name in self._parameters}

    def adapt(self, keys: PeftConfig) -> None:
        for name, own in self.adapted().items():
            weight = self.rows(name)
            experts, outputs, inputs = weight.shape
            like: Any = {"dtype": weight.dtype, "device": weight.device}
            limit = inputs**-0.5  # as of a single linear layer
            drawn = nn.init.uniform_(torch.empty(experts, keys.r, inputs, **like), -limit, limit)
            setattr(self, own[A], nn.Parameter(drawn))
            setattr(self, own[B], nn.Parameter(torch.zeros(experts, outputs, keys.r, **like)))

    def product(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        result = self.dense(name, rows, ends)
        if not self.adapts:
            return result
        own = {one: getattr(self, attribute) for one, attribute in self.adapted()[name].items()}
        dropped = rows if self.lora_dropout is None else self.lora_dropout(rows)
        return result + _grouped(_grouped(dropped, own[A], ends) * self.lora_scale, own[B], ends)


@functools.cache
def adapted_class(experts: type) -> type:
    """The class that a module of packed experts becomes."""
    return type(f"Lora{experts.__name__}", (LoraExperts, experts), {})


def packs_experts(module: nn.Module) -> bool:
    """Whether transformers' own ways to compute packed experts know the module."""
    told = module.__dict__
    return "has_gate" in told and WEIGHTS[2] in module._parameters and not told.get("has_post_expert_norm")


def _grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows in groups that end at ``ends``, each group through its own one of ``weights`` (groups, outputs, inputs)."""
    row_bytes = [size * rows.element_size() for size in weights.shape[1:]]
    if rows.dtype != torch.float64 and not any(size % ALIGNED for size in row_bytes):
        return F.grouped_mm(rows, weights.mT, offs=ends.to(torch.int32))
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, one) for part, one in zip(rows.split(counts), weights.unbind(), strict=True)])
