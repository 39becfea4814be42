"""Runs a model that is larger than memory: its blocks' weights are read when they are needed, and let go after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mgpu_pipe.families.frames import Frames
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.models.plans import decoder_blocks
from mgpu_pipe.objectives.pictures import pictures_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgpu_pipe.inference.load import ReadTensor


PROBE_ROWS, PROBE_TOKENS = 2, 32
Inputs = dict[str, torch.Tensor]


def probe(model: PreTrainedModel) -> Inputs:
    """Random arguments of a forward pass: tokens, which an encoder and a decoder both get, pictures, or both; sound."""
    generator, inputs = torch.Generator().manual_seed(0), Inputs()
    two_towers = hasattr(model, "logit_scale")
    if model.main_input_name == "input_values":
        samples = Frames.of_fields(model.config.to_dict()).samples_of(PROBE_TOKENS)
        return {"input_values": torch.randn(PROBE_ROWS, samples, generator=generator)}
    if model.main_input_name == "input_features":
        shape = (model.config.num_mel_bins, 2 * model.config.max_source_positions)
        ids = torch.randint(0, model.config.vocab_size, (PROBE_ROWS, PROBE_TOKENS), generator=generator)
        return {
            "input_features": torch.randn(PROBE_ROWS, *shape, generator=generator),
            "decoder_input_ids": ids[:, : model.config.max_target_positions],
        }
    if two_towers or model.main_input_name == "pixel_values":
        inputs["pixel_values"] = torch.randn(PROBE_ROWS, *picture_shape(model.config), generator=generator)
        if not two_towers:
            return inputs
    text: Any = model.config.get_text_config()
    image = getattr(model.config, "image_token_id", None)
    kind = None if image is None else pictures_of(model.config)
    picture = None if kind is None else kind.drawn(generator)
    seen = 0 if picture is None else picture.tokens
    tokens = seen + min(PROBE_TOKENS, getattr(text, "max_position_embeddings", None) or PROBE_TOKENS)
    ids = torch.randint(0, text.vocab_size, (PROBE_ROWS, tokens), generator=generator)
    if kind is not None and picture is not None:
        ids[ids == kind.token] = 0
        ids[0, 1 : 1 + seen] = kind.token
        given = kind.inputs({"input_ids": ids, **kind.collated(ids, [[picture], *[[]] * (PROBE_ROWS - 1)])})
        return {name: value.contiguous() for name, value in given.items() if name != "use_cache"}
    return {
        **inputs,
        "input_ids": ids,
        **({"decoder_input_ids": ids.clone()} if model.config.is_encoder_decoder else {}),
    }


def answer(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """The logits that ``model`` gives."""
    cached = {} if inputs.keys() & {"pixel_values", "input_values"} else {"use_cache": False}
    output = model(**inputs, **cached)
    logits: torch.Tensor = output.logits_per_image if "logits_per_image" in output else output.logits
    return logits


@torch.no_grad()
def streamed_logits(model: PreTrainedModel, read: ReadTensor, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Logits of ``inputs``, as of :func:`probe`, with weights of ``dtype``.

    In memory at once: what lies outside the repeated blocks (embeddings, last norm, head), and one block.

    Args:
        model: parameters on the meta device, buffers real, in evaluation mode; left as it was.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {names[id(block)]: block for block in decoder_blocks(model)}
    meta = dict(model.named_parameters(remove_duplicate=False))
    inside = {name: [key for key in meta if key.startswith(f"{name}.")] for name in blocks}
    outside = set(meta).difference(*inside.values())

    def fill(keys: Iterable[str]) -> None:
        made: dict[int, nn.Parameter] = {}  # tied parameters stay one
        for key in keys:
            if id(meta[key]) not in made:
                made[id(meta[key])] = nn.Parameter(read(key, dtype), requires_grad=False)
            _put(model, key, made[id(meta[key])])

    def let_go(keys: Iterable[str]) -> None:
        for key in keys:
            _put(model, key, meta[key])

    hooks = []
    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(_calling(fill, inside[name])))
        hooks.append(block.register_forward_hook(_calling(let_go, inside[name])))
    try:
        fill(sorted(outside))
        return answer(
            model, {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        )
    finally:
        for hook in hooks:
            hook.remove()
        let_go(meta)


def _calling(action: Callable[[Iterable[str]], None], keys: list[str]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        action(keys)

    return hook


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    model.get_submodule(module)._parameters[attribute] = parameter
