"""Padding-invariant speech encoders, and greedy transcripts.

In transformers the first norm of a waveform's encoder covers the whole padded row, and hidden frames come from a
generator of the process. Here the norm covers valid frames only, and hidden frames are an input.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mgpu_pipe.architectures.family import FRAMES_A_POSITION, SECOND, Frames
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.system.compat.transformers_private import hide_by, hide_nothing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


HIDDEN_INPUTS = ("hidden_frames", "hidden_features")
"""Additional inputs of a forward pass."""


@dataclass
class SpeechInputs:
    """Facts of the current micro-batch that a model's modules need, from the model's inputs."""

    model: PreTrainedModel
    frames: Frames
    lengths: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Samples of each row without padding."""
    hidden_frames: torch.Tensor | None = None
    """Boolean, (rows, frames)."""
    hidden_features: torch.Tensor | None = None
    """Boolean, (rows, width)."""

    def read_inputs(
        self, _: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: stores what the modules need and removes the additional inputs."""
        values, mask = inputs["input_values"], inputs.get("attention_mask")
        whole = torch.full(values.shape[:1], values.shape[1], device=values.device)
        self.lengths = whole if mask is None else mask.sum(1)
        self.hidden_frames, self.hidden_features = (inputs.pop(name, None) for name in HIDDEN_INPUTS)
        return args, inputs

    def hide(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``states``, (rows, frames, width), with the learned vector in hidden frames, 0 in hidden features."""
        if self.hidden_frames is not None:
            vector = cast(Any, self.model.base_model).masked_spec_embed.to(states.dtype)
            states = torch.where(self.hidden_frames[:, : states.shape[1], None], vector, states)
        if self.hidden_features is not None:
            states = states.masked_fill(self.hidden_features[:, None], 0)
        return states


class RowNorm(nn.GroupNorm):
    """Norm of each channel over the valid frames of a row."""

    speech_inputs: SpeechInputs
    layer: int
    """Number of convolutions before the norm."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        frames = self.speech_inputs.frames.num_frames(self.speech_inputs.lengths, self.layer)[:, None, None]
        inside = torch.arange(states.shape[-1], device=states.device) < frames
        values = states.float()
        mean = (values * inside).sum(-1, keepdim=True) / frames
        centred = (values - mean) * inside
        variance = centred.square().sum(-1, keepdim=True) / frames
        normed = centred * torch.rsqrt(variance + self.eps)
        return (normed * self.weight[:, None] + self.bias[:, None]).to(states.dtype)


def cast_to_weights(convolution: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Forward pre-hook that casts sound to the type of the weights; some engines do not."""
    return (args[0].to(convolution.weight.dtype),)


def make_padding_invariant(model: PreTrainedModel) -> None:
    """Makes each recording's result independent of its micro-batch, in place.

    The first convolution takes float32 in every precision. Inputs may include :data:`HIDDEN_INPUTS`.
    """
    speech_inputs = SpeechInputs(model, Frames.from_fields(model.config.to_dict()))
    blocks = cast(Any, model.base_model).feature_extractor.conv_layers
    blocks[0].conv.register_forward_pre_hook(cast_to_weights)
    for layer, block in enumerate(blocks):
        norm = getattr(block, "layer_norm", None)
        if isinstance(norm, nn.GroupNorm):
            norm.__class__ = RowNorm
            cast(RowNorm, norm).speech_inputs, cast(RowNorm, norm).layer = speech_inputs, layer + 1
    hide_by(model, speech_inputs.hide)
    model.register_forward_pre_hook(speech_inputs.read_inputs, with_kwargs=True)


@dataclass
class SecondFrames:
    """Frames of each second of the current recordings, for Qwen3-Omni's convolutions."""

    next: list[int] = field(default_factory=list)
    """Frames of the seconds that no convolution has read."""
    read: list[int] = field(default_factory=list)
    """Frames of the seconds that the convolutions read now."""

    def read_lengths(
        self, _: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook of the encoder. The last second of a longer recording has silence after it."""
        lengths: list[int] = inputs["feature_lens"].tolist()
        self.next = [min(frames, SECOND) for frames in lengths for _ in range(-(-frames // SECOND))]
        return args, inputs

    def take(self, convolution: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """Forward pre-hook of the first convolution, which gets some seconds at a time."""
        seconds = len(args[0])
        self.read, self.next = self.next[:seconds], self.next[seconds:]
        return cast_to_weights(convolution, args)

    def clear(self, halvings: int, _: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """Forward pre-hook of the convolution after ``halvings`` others: zeros after the end of each second."""
        states = args[0]
        frames = torch.tensor([-(-number // 2**halvings) for number in self.read], device=states.device)
        inside = torch.arange(states.shape[-1], device=states.device) < frames[:, None]
        return (states * inside[:, None, None],)


def read_recordings_alone(model: PreTrainedModel) -> None:
    """Makes a recording's result in Qwen3-Omni independent of the others in its micro-batch, in place.

    transformers fills a recording of less than a second up to the longest of the micro-batch, which changes its end.
    """
    if family_of(str(model.config.model_type)).recordings != "seconds":
        return
    tower, seconds = cast(Any, model.base_model).audio_tower, SecondFrames()
    tower.register_forward_pre_hook(seconds.read_lengths, with_kwargs=True)
    tower.conv2d1.register_forward_pre_hook(seconds.take)
    tower.conv2d2.register_forward_pre_hook(partial(seconds.clear, 1))
    tower.conv2d3.register_forward_pre_hook(partial(seconds.clear, 2))


def prepare_spectrogram_encoder(model: Any) -> None:
    """Makes ``model`` take float32 spectrograms in every precision and hide nothing by itself, in place."""
    base = model.base_model
    if hasattr(base, "encoder"):
        hide_nothing(model)
        first = base.encoder.conv1
    else:
        first = base.embeddings.patch_embeddings.projection
    first.register_forward_pre_hook(cast_to_weights)


class FixedNorm(nn.BatchNorm2d):
    """Batch norm that uses its stored statistics in training too, and leaves them as they are."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        dtype = self.weight.dtype
        mean, variance = (cast(torch.Tensor, values).to(dtype) for values in (self.running_mean, self.running_var))
        return F.batch_norm(states.to(dtype), mean, variance, self.weight, self.bias, False, eps=self.eps)


def fix_norms(model: nn.Module) -> None:
    """Makes each recording's result independent of its micro-batch, in place: batch norms use stored statistics.

    They take float32 in every precision.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = FixedNorm


def spectrogram_shape(config: Any) -> tuple[int, ...]:
    """Shape of one recording's spectrogram: (bands, frames) for Whisper, (frames, bands) for a model of patches,
    (1, most frames, bands) for CLAP."""
    if hasattr(config, "audio_config"):
        part = config.audio_config
        return 1, int(part.spec_size) * (int(part.spec_size) // int(part.num_mel_bins)), int(part.num_mel_bins)
    if hasattr(config, "max_source_positions"):
        return int(config.num_mel_bins), FRAMES_A_POSITION * int(config.max_source_positions)
    return int(config.max_length), int(config.num_mel_bins)


@torch.no_grad()
def greedy_transcripts(
    model: Any, features: torch.Tensor, most: int, known: torch.Tensor | None = None
) -> list[list[int]]:
    """Tokens of each recording, up to its end, ``most`` or the decoder's positions.

    A collective call: with a sharded model no process leaves before the others.

    Args:
        features: spectrograms, shape (recordings, bins, frames).
        known: boolean by recording; those with a known text are not transcribed.
    """
    config, rows = model.config, len(features)
    done = torch.zeros(rows, dtype=torch.bool, device=features.device) if known is None else known
    ids = torch.full((rows, 1), int(config.decoder_start_token_id), device=features.device)
    inputs: dict[str, Any] = {"input_features": features}
    for _ in range(min(most, int(config.max_target_positions))):
        if _all_done(done):
            break
        output = model(**inputs, decoder_input_ids=ids[:, -1:], use_cache=True)
        inputs = {"encoder_outputs": (output.encoder_last_hidden_state,), "past_key_values": output.past_key_values}
        ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], 1)
        done = done | (ids[:, -1] == config.eos_token_id)
    tokens: list[list[int]] = ids[:, 1:].tolist()
    return tokens


def _all_done(done: torch.Tensor) -> bool:
    """Whether every recording of every process is done."""
    unfinished = (~done).any().int()
    if dist.is_initialized():
        dist.all_reduce(unfinished, op=dist.ReduceOp.MAX)
    return not bool(unfinished)
