"""LoRA and DoRA: a low-rank product, trained next to a frozen linear layer (Hu et al. 2021, arXiv:2106.09685).

A linear layer becomes a LoRA layer by a change of class, so its weight keeps its name. Plans, recipes and checkpoints
see a layer with two more parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.system.compat.transformers_private import apply_gate

A, B = "lora_A", "lora_B"
"""Parameters of shapes (rank, inputs) and (outputs, rank), even if the weight is stored transposed."""


class Adapted(nn.Module):
    """Module with adapters. A subclass also inherits from the module's plain class."""

    lora_scale: float
    lora_dropout: nn.Module | None
    adapts: bool = True
    """False disables the adapters."""

    def adapter_names(self) -> dict[str, dict[str, str]]:
        """Attributes of the adapter's parameters by kind (``lora_A``, ...), for each adapted weight."""
        raise NotImplementedError

    def adapt(self, keys: PeftConfig) -> None:
        """Adds adapters to the module, whose class is already this one. They do not change its result yet."""
        raise NotImplementedError

    def rows(self, name: str = "weight") -> torch.Tensor:
        """Frozen weight as (..., outputs, inputs)."""
        return as_rows(self, getattr(self, name))

    @classmethod
    def merge(cls, rows: torch.Tensor, scale: float, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Weight (..., outputs, inputs) equivalent to ``rows`` with ``adapter``, its parameters by kind."""
        return rows + (adapter[B] @ adapter[A]) * scale


def as_rows(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` as (..., outputs, inputs) from the form that ``module`` stores, and back."""
    return weight.mT if isinstance(module, Conv1D) or module.__dict__.get("is_transposed") else weight


class LoraLayer(Adapted):
    """Base of adapted linear layers."""

    PARAMETERS: tuple[str, ...] = (A, B)
    """Names of the adapter's parameters."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def adapter_names(self) -> dict[str, dict[str, str]]:
        return {"weight": {name: name for name in self.PARAMETERS}}

    def adapt(self, keys: PeftConfig) -> None:
        weight = self.rows()
        like: Any = {"dtype": weight.dtype, "device": weight.device}
        outputs, inputs = weight.shape
        self.lora_A = nn.Parameter(torch.empty(keys.r, inputs, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.lora_B = nn.Parameter(torch.zeros(outputs, keys.r, **like))

    def low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Product that the adapter adds, (..., outputs)."""
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        return F.linear(F.linear(dropped, self.lora_A) * self.lora_scale, self.lora_B)  # scaled at its narrowest

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """Product with the frozen weight."""
        return F.linear(x, self.rows())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Result without the bias."""
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


MAGNITUDE = "lora_magnitude"
"""DoRA's parameter of shape (outputs,)."""


class DoraLayer(LoraLayer):
    PARAMETERS = (A, B, MAGNITUDE)
    lora_magnitude: nn.Parameter
    norm_group: dist.ProcessGroup | None = None
    """Ranks that each have some inputs of the weight's rows."""

    def adapt(self, keys: PeftConfig) -> None:
        super().adapt(keys)
        self.lora_magnitude = nn.Parameter(torch.zeros_like(self.lora_B[:, 0]))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        plain = super().product(x)
        if not self.adapts:
            return plain
        adapter = {name: getattr(self, name) for name in self.PARAMETERS}
        return plain * _factors(self.rows(), self.lora_scale, adapter, self.norm_group).to(plain.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias: Any = self.bias
        return self.product(x) if bias is None else self.product(x) + bias

    @classmethod
    def merge(cls, rows: torch.Tensor, scale: float, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().merge(rows, scale, adapter) * _factors(rows, scale, adapter).unsqueeze(1).to(rows.dtype)


class DoraLinear(DoraLayer, nn.Linear):
    pass


class DoraConv1D(DoraLayer, Conv1D):
    pass


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """2-norms of the rows of (outputs, inputs), at least fp32."""
    return _squares(rows).sqrt()


def _factors(
    rows: torch.Tensor, scale: float, adapter: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Factor of each output, exactly 1 at first."""
    with torch.no_grad():
        squares = torch.stack([_squares(rows), _squares(LoraLayer.merge(rows, scale, adapter))])
        if group is not None:
            dist.all_reduce(squares, group=group)
        before, now = squares.sqrt()
        now.clamp_min_(torch.finfo(now.dtype).tiny)  # a row of zeros stays zero
    return (before + adapter[MAGNITUDE]) / now


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(1)


WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""transformers' names of packed experts' weights."""
ALIGNED = 16
"""A row's bytes must be a multiple of this for torch's grouped product."""


class GroupedExperts(nn.Module):
    """Packed experts that compute rows in the order of their experts."""

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
        inner = apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
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
        """Products with the frozen weights, for rows in groups that end at ``ends``."""
        return _multiply_grouped(rows, as_rows(self, getattr(self, name)), ends)


class LoraExperts(GroupedExperts, Adapted):
    def adapter_names(self) -> dict[str, dict[str, str]]:
        return {name: {kind: f"{name}_{kind}" for kind in (A, B)} for name in WEIGHTS if name in self._parameters}

    def adapt(self, keys: PeftConfig) -> None:
        for name, attributes in self.adapter_names().items():
            weight = self.rows(name)
            experts, outputs, inputs = weight.shape
            like: Any = {"dtype": weight.dtype, "device": weight.device}
            limit = inputs**-0.5  # like a single linear layer
            initial = nn.init.uniform_(torch.empty(experts, keys.r, inputs, **like), -limit, limit)
            setattr(self, attributes[A], nn.Parameter(initial))
            setattr(self, attributes[B], nn.Parameter(torch.zeros(experts, outputs, keys.r, **like)))

    def product(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        result = self.dense(name, rows, ends)
        if not self.adapts:
            return result
        adapter = {kind: getattr(self, attribute) for kind, attribute in self.adapter_names()[name].items()}
        dropped = rows if self.lora_dropout is None else self.lora_dropout(rows)
        return result + _multiply_grouped(
            _multiply_grouped(dropped, adapter[A], ends) * self.lora_scale, adapter[B], ends
        )


@functools.cache
def adapted_class(experts: type) -> type:
    """Adapted class of packed experts."""
    return type(f"Lora{experts.__name__}", (LoraExperts, experts), {})


def packs_experts(module: nn.Module) -> bool:
    """Whether transformers computes the module's packed experts in its standard ways."""
    attributes = module.__dict__
    return "has_gate" in attributes and WEIGHTS[2] in module._parameters and not attributes.get("has_post_expert_norm")


def _multiply_grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of each group of rows, ending at ``ends``, with its matrix of ``weights`` (groups, outputs, inputs)."""
    row_bytes = [size * rows.element_size() for size in weights.shape[1:]]
    if rows.dtype != torch.float64 and not any(size % ALIGNED for size in row_bytes):
        return F.grouped_mm(rows, weights.mT, offs=ends.to(torch.int32))
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat(
        [F.linear(part, weight) for part, weight in zip(rows.split(counts), weights.unbind(), strict=True)]
    )
