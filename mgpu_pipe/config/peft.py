"""The keys of adapters: small trained parts beside frozen weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

ALL_LINEAR = "all-linear"


@dataclass
class PeftConfig:
    name: Literal["none", "lora", "dora", "qlora"] = "none"
    """none trains the model's own weights; lora a low-rank product beside each targeted linear layer; dora also
    the length of each of its weight's rows; qlora is lora beside frozen matrices of four bits."""
    r: int = field(default=16, metadata={"at_least": 1})
    """Rank of the product."""
    alpha: float = 32.0
    """The product is scaled by alpha / r, or by alpha / sqrt(r) with rslora."""
    rslora: bool = False
    """Scale by alpha / sqrt(r), which keeps the size of updates equal over ranks (arXiv:2312.03732)."""
    dropout: float = field(default=0.0, metadata={"at_least": 0.0})
    """Share of the product's inputs that is dropped in training."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names or patterns of linear layers, such as q_proj or model.layers.0.*; all-linear: all in the blocks, routers
    left out; experts: the weights of a mixture's experts; vision, audio, language, projector: all-linear in that part
    of the model."""
    train_also: list[str] = field(default_factory=list)
    """Patterns of parameter names (*, ?, [...]), or parts of the model, that are trained as they are, such as
    *norm.weight or projector."""

    init_from: str | None = None
    """A folder of the peft package, or of export --adapter, whose adapters the run starts from."""

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (self.r**0.5 if self.rslora else self.r)

    def unquantised(self) -> PeftConfig:
        """The same adapters beside weights of their usual form."""
        return replace(self, name="lora") if self.name == "qlora" else self
