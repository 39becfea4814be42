"""The dynamic loss scale of fp16: small gradients are lifted into fp16's range and taken back in fp32.

The rule is that of ``torch.amp.GradScaler`` (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), decided from the
global gradient norm, so by all ranks alike: a norm that is not finite halves the scale and skips the update; after
``interval`` updates in a row the scale doubles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GROWTH, BACKOFF = 2.0, 0.5
SMALLEST = 2.0**-10
"""Below it no gradient could be out of fp16's range, so that the fault lies elsewhere."""


@dataclass
class LossScale:
    """The factor on the loss, and how many updates it has gone well for."""

    value: float = 2.0**16
    updates: int = 0
    interval: int = 2000

    def update(self, finite: bool) -> None:
        """Note the outcome of a step's backward passes.

        Raises:
            OverflowError: gradients are not finite whatever the scale.
        """
        if not finite:
            self.value, self.updates = self.value * BACKOFF, 0
            if self.value < SMALLEST:
                raise OverflowError("gradients are not finite at the smallest loss scale")
            return
        self.updates += 1
        if self.updates == self.interval:
            self.value, self.updates = self.value * GROWTH, 0

    def state(self) -> dict[str, float]:
        """For a checkpoint's ``state.json``."""
        return {"value": self.value, "updates": self.updates}

    def restore(self, state: Mapping[str, float]) -> None:
        self.value, self.updates = float(state["value"]), int(state["updates"])
