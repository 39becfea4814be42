"""Runs a model that is larger than memory: reads the weights of each block for its forward pass, then frees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.architectures.find import takes_media
from mgpu_pipe.models.field_sizes import usable_positions
from mgpu_pipe.models.fields import has_two_towers, picture_shape
from mgpu_pipe.models.shard_units import decoder_blocks
from mgpu_pipe.models.speech import spectrogram_shape
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgpu_pipe.inference.open import ReadTensor


PROBE_ROWS, PROBE_TOKENS = 2, 32
Inputs = dict[str, torch.Tensor]


def probe(model: PreTrainedModel) -> Inputs:
    """Random arguments of a forward pass: tokens (for encoder and decoder alike), pictures, both, or sound."""
    generator, inputs = torch.Generator().manual_seed(0), Inputs()
    two_towers = has_two_towers(model)
    if model.main_input_name in ("input_values", "input_features") and not hasattr(model.config, "conv_kernel"):
        inputs[model.main_input_name] = torch.randn(PROBE_ROWS, *spectrogram_shape(model.config), generator=generator)
        if not model.can_generate():
            return inputs
        ids = torch.randint(0, model.config.vocab_size, (PROBE_ROWS, PROBE_TOKENS), generator=generator)
        return {**inputs, "decoder_input_ids": ids[:, : model.config.max_target_positions]}
    if model.main_input_name == "input_values":
        samples = Frames.from_fields(model.config.to_dict()).min_samples(PROBE_TOKENS)
        return {"input_values": torch.randn(PROBE_ROWS, samples, generator=generator)}
    if two_towers and hasattr(model.config, "audio_config"):
        inputs["input_features"] = torch.randn(PROBE_ROWS, *spectrogram_shape(model.config), generator=generator)
    elif two_towers or model.main_input_name == "pixel_values":
        inputs["pixel_values"] = torch.randn(PROBE_ROWS, *picture_shape(model.config), generator=generator)
        if not two_towers:
            return inputs
    text: Any = model.config.get_text_config()
    kind = build_picture_inputs(model.config) if takes_media(model.config) else None
    picture = None if kind is None else kind.random_picture(generator)
    places = 0 if picture is None else picture.tokens
    positions = getattr(text, "max_position_embeddings", None) or PROBE_TOKENS
    tokens = places + min(PROBE_TOKENS, usable_positions(positions, text.pad_token_id, text.model_type))
    ids = torch.randint(0, text.vocab_size, (PROBE_ROWS, tokens), generator=generator)
    if kind is not None and picture is not None:
        ids[kind.is_placeholder(ids)] = 0
        ids[0, 1 : 1 + places] = kind.placeholder_of(picture)
        inputs_of_pictures = kind.inputs({"input_ids": ids, **kind.collate(ids, [[picture], *[[]] * (PROBE_ROWS - 1)])})
        return {name: value.contiguous() for name, value in inputs_of_pictures.items() if name != "use_cache"}
    return {
        **inputs,
        "input_ids": ids,
        **({"decoder_input_ids": ids.clone()} if model.config.is_encoder_decoder else {}),
    }


def compute_logits(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """The logits of ``model`` for ``inputs``; the last states of a model without a head."""
    is_encoder = inputs.keys() & {"pixel_values", "input_values"} or inputs.keys() == {"input_features"}
    cached = {} if is_encoder or has_two_towers(model) else {"use_cache": False}
    output = model(**inputs, **cached)
    names = ("logits_per_image", "logits_per_audio", "logits", "last_hidden_state")
    logits: torch.Tensor = next(output[name] for name in names if name in output)
    return logits


@torch.no_grad()
def streamed_logits(model: PreTrainedModel, read: ReadTensor, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Logits of ``inputs``, which come from :func:`probe`, with weights of ``dtype``.

    Holds in memory one block and the weights outside the repeated blocks (embeddings, last norm, head).

    Args:
        model: parameters on the meta device, buffers real, in evaluation mode; unchanged at the end.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {names[id(block)]: block for block in decoder_blocks(model)}
    meta = dict(model.named_parameters(remove_duplicate=False))
    inside = {name: [key for key in meta if key.startswith(f"{name}.")] for name in blocks}
    outside = set(meta).difference(*inside.values())

    def fill(keys: Iterable[str]) -> None:
        filled: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for key in keys:
            if id(meta[key]) not in filled:
                filled[id(meta[key])] = nn.Parameter(read(key, dtype), requires_grad=False)
            _set_parameter(model, key, filled[id(meta[key])])

    def free(keys: Iterable[str]) -> None:
        for key in keys:
            _set_parameter(model, key, meta[key])

    hooks = []
    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(_make_hook(fill, inside[name])))
        hooks.append(block.register_forward_hook(_make_hook(free, inside[name])))
    try:
        fill(sorted(outside))
        return compute_logits(
            model, {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        )
    finally:
        for hook in hooks:
            hook.remove()
        free(meta)


def _make_hook(action: Callable[[Iterable[str]], None], keys: list[str]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        action(keys)

    return hook


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    model.get_submodule(module)._parameters[attribute] = parameter
