"""Speech models whose result for a recording depends on that recording alone.

transformers' encoders of waveforms take the mean and deviation of a whole padded row in their first norm, and draw the
frames that they hide from a generator of the process. Here the norm looks at a row's own samples, and what is hidden is
told from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mgpu_pipe.compat.transformers_private import hide_by
from mgpu_pipe.families.frames import Frames

if TYPE_CHECKING:
    from transformers import PreTrainedModel


HIDDEN = ("hidden_frames", "hidden_features")
"""Inputs of a forward pass beside transformers' own."""


@dataclass
class Hearing:
    """What the parts of a model have to know of the micro-batch that goes through it, taken from the model's inputs."""

    model: PreTrainedModel
    frames: Frames
    lengths: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Samples of each row that are no padding."""
    hidden_frames: torch.Tensor | None = None
    """Boolean, (rows, frames)."""
    hidden_features: torch.Tensor | None = None
    """Boolean, (rows, width)."""

    def listen(
        self, _: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a forward pass: keep what the parts need, and hand on what transformers knows."""
        values, mask = inputs["input_values"], inputs.get("attention_mask")
        whole = torch.full(values.shape[:1], values.shape[1], device=values.device)
        self.lengths = whole if mask is None else mask.sum(1)
        self.hidden_frames, self.hidden_features = (inputs.pop(name, None) for name in HIDDEN)
        return args, inputs

    def hide(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``states``, (rows, frames, width), without what is hidden; frames get the model's own learnt vector."""
        if self.hidden_frames is not None:
            vector = cast(Any, self.model.base_model).masked_spec_embed.to(states.dtype)
            states = torch.where(self.hidden_frames[:, : states.shape[1], None], vector, states)
        if self.hidden_features is not None:
            states = states.masked_fill(self.hidden_features[:, None], 0)
        return states


class RowNorm(nn.GroupNorm):
    """A norm of each channel over a row's own frames; those behind them do not count."""

    hearing: Hearing
    layer: int
    """Convolutions before it."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        frames = self.hearing.frames.of_samples(self.hearing.lengths, self.layer)[:, None, None]
        inside = torch.arange(states.shape[-1], device=states.device) < frames
        values = states.float()
        mean = (values * inside).sum(-1, keepdim=True) / frames
        centred = (values - mean) * inside
        variance = centred.square().sum(-1, keepdim=True) / frames
        normed = centred * torch.rsqrt(variance + self.eps)
        return (normed * self.weight[:, None] + self.bias[:, None]).to(states.dtype)


def as_weights(convolution: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Before its forward pass: sound in the type that it computes in, which not every engine casts inputs to."""
    return (args[0].to(convolution.weight.dtype),)


def hear_alone(model: PreTrainedModel) -> None:
    """Have the parts of ``model`` that look beyond a recording look at it alone, and its first convolution take float32
    whatever it computes in; its inputs may have :data:`HIDDEN`."""
    hearing = Hearing(model, Frames.of_fields(model.config.to_dict()))
    blocks = cast(Any, model.base_model).feature_extractor.conv_layers
    blocks[0].conv.register_forward_pre_hook(as_weights)
    for layer, block in enumerate(blocks):
        norm = getattr(block, "layer_norm", None)
        if isinstance(norm, nn.GroupNorm):
            norm.__class__ = RowNorm
            cast(RowNorm, norm).hearing, cast(RowNorm, norm).layer = hearing, layer + 1
    hide_by(model, hearing.hide)
    model.register_forward_pre_hook(hearing.listen, with_kwargs=True)
