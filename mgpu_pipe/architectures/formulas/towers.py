"""Vision towers and projectors of vision-language models, from fields: shapes, and exact counts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.architectures.config_source import NO_DEFAULT, config_class

Read = Callable[[str], Any]
"""Value of a field of a configuration, or its class's default; None without either."""
Projector = Callable[[Read, Read, int], tuple[int, int]]
"""Parameters of a projector, by tower, model and the language model's width, and those that are not cut."""


@dataclass(frozen=True)
class VisionParameters:
    """Parameters of a model's vision part.

    Attributes:
        layer: of each layer of the tower.
        layers: number of the tower's layers.
        around: of the tower outside of its layers.
        projector: of what lies between tower and language model.
        norms: those of a layer in norms and scales of the width.
        uncut_projector: those of the projector that tensor parallelism does not cut.
    """

    layer: int
    layers: int
    around: int
    projector: int
    norms: int
    uncut_projector: int

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.around + self.projector

    @property
    def uncut_tower(self) -> int:
        """Parameters of the tower that tensor parallelism does not cut."""
        return self.layers * self.norms + self.around


@dataclass(frozen=True)
class VisionShape:
    """Shape of a vision tower.

    Attributes:
        inner: width of the feed-forward layer.
        is_gated: whether that layer has a third matrix, a gate.
        patches_of_place: patches that make a vector of the language model.
        patches: most patches of a picture; None in native size.
    """

    width: int
    layers: int
    heads: int
    inner: int
    is_gated: bool
    patches_of_place: int
    patches: int | None


def vision_shape(fields: Mapping[str, Any]) -> VisionShape | None:
    """Shape of the tower of the model with these ``fields``; None as in :func:`vision_parameters`."""
    known = _known_tower(fields)
    if known is None:
        return None
    kind, tower, model = known
    return VisionShape(
        width=int(tower("hidden_size")),
        layers=_layers(tower),
        heads=int(tower("num_attention_heads") or tower("num_heads")),
        inner=int(tower("intermediate_size")),
        is_gated=kind in _GATED,
        patches_of_place=_patches_of_place(tower, model),
        patches=_positions(tower) if tower("image_size") else None,
    )


def _patches_of_place(tower: Read, model: Read) -> int:
    if model("mm_tokens_per_image"):
        return _positions(tower) // int(model("mm_tokens_per_image"))
    ratio = model("downsample_ratio")
    merge = tower("spatial_merge_size") or model("spatial_merge_size") or tower("pooling_kernel_size")
    return int(merge or model("scale_factor") or (round(1 / ratio) if ratio else 1)) ** 2


def vision_parameters(fields: Mapping[str, Any]) -> VisionParameters | None:
    """Vision part of the model with these ``fields``; None for other models, or an unknown tower.

    Args:
        fields: see :func:`mgpu_pipe.models.fields.resolved_fields`; the language model's width is ``hidden_size``.
    """
    known = _known_tower(fields)
    if known is None:
        return None
    kind, tower, model = known
    layer, around = _TOWERS[kind](tower)
    projector, uncut = _PROJECTORS[str(fields["model_type"])](tower, model, int(fields["hidden_size"]))
    norms = _NORMS.get(kind, 4) * int(tower("hidden_size"))
    return VisionParameters(layer, _layers(tower), around, projector, norms, uncut)


def _known_tower(fields: Mapping[str, Any]) -> tuple[str, Read, Read] | None:
    """The tower's type, and readers of its fields and of the model's; None where no formula knows them."""
    nested, model_type = fields.get("vision_config"), str(fields.get("model_type"))
    if not isinstance(nested, Mapping) or model_type not in _PROJECTORS:
        return None
    kind = str(nested.get("model_type") or model_type)
    kind = f"{kind}_vision" if kind == model_type else kind
    return (kind, _reader(nested, kind), _reader(fields, model_type)) if kind in _TOWERS else None


def _reader(fields: Mapping[str, Any], model_type: str) -> Read:
    known = config_class(model_type)

    def read(name: str) -> Any:
        value = fields.get(name)
        default = known.defaults.get(name) if value is None and known is not None else value
        return None if default is NO_DEFAULT else default

    return read


def _layers(tower: Read) -> int:
    return int(tower("num_hidden_layers") or tower("depth"))


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + outputs * bias


def _layer(tower: Read, biases: bool, gated: bool, norms: int) -> int:
    """Parameters of a layer; ``norms``: vectors of its norms."""
    width, inner = int(tower("hidden_size")), int(tower("intermediate_size"))
    feed_forward = (1 + gated) * _linear(width, inner, biases) + _linear(inner, width, biases)
    return 4 * _linear(width, width, biases) + feed_forward + norms * width


def _patches(tower: Read, bias: bool) -> int:
    """Parameters of the projection of patches."""
    channels, frames = tower("num_channels") or tower("in_channels") or 3, tower("temporal_patch_size") or 1
    return _linear(channels * frames * _side(tower("patch_size")) ** 2, int(tower("hidden_size")), bias)


def _positions(tower: Read) -> int:
    """Patches of a picture of one size."""
    return int((_side(tower("image_size")) // _side(tower("patch_size"))) ** 2)


def _clip(tower: Read) -> tuple[int, int]:
    width = int(tower("hidden_size"))
    return _layer(tower, True, False, 4), _patches(tower, False) + (_positions(tower) + 2 + 4) * width


def _siglip(tower: Read) -> tuple[int, int]:
    width, layer = int(tower("hidden_size")), _layer(tower, True, False, 4)
    # the head: a query, and a layer with one norm
    head = layer - width if tower("vision_use_head") else 0
    return layer, _patches(tower, True) + (_positions(tower) + 2) * width + head


def _internvl(tower: Read) -> tuple[int, int]:
    width, layer = int(tower("hidden_size")), _layer(tower, True, False, 4 + 2)
    layer += width * (2 * bool(tower("use_qk_norm")) - 3 * (not tower("attention_bias")))
    positions = (_positions(tower) + 1) * bool(tower("use_absolute_position_embeddings"))
    vectors = 1 + bool(tower("use_mask_token")) + positions + 2 * (not tower("use_mean_pooling"))
    return layer, _patches(tower, True) + vectors * width


def _pixtral(tower: Read) -> tuple[int, int]:
    return _layer(tower, False, True, 2), _patches(tower, False) + int(tower("hidden_size"))


def _qwen25(tower: Read) -> tuple[int, int]:
    return _layer(tower, True, True, 2), _patches(tower, False)


def _qwen3(tower: Read) -> tuple[int, int]:
    around = _patches(tower, True) + int(tower("num_position_embeddings") * tower("hidden_size"))
    return _layer(tower, True, False, 4), around


def _gemma4(tower: Read) -> tuple[int, int]:
    width, layer = int(tower("hidden_size")), _layer(tower, False, True, 4) + 2 * int(tower("head_dim"))
    around = _patches(tower, False) + 2 * int(tower("position_embedding_size")) * width
    return layer, around + 2 * width * bool(tower("standardize"))


_TOWERS: Mapping[str, Callable[[Read], tuple[int, int]]] = {
    "clip_vision_model": _clip,
    **dict.fromkeys(("siglip_vision_model", "smolvlm_vision", "idefics3_vision"), _siglip),
    "internvl_vision": _internvl,
    "pixtral": _pixtral,
    "qwen2_5_vl_vision": _qwen25,
    **dict.fromkeys(("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision"), _qwen3),
    "gemma4_vision": _gemma4,
}
"""Parameters of a layer, and outside of the layers, by type of tower."""
_NORMS = {"internvl_vision": 6, "pixtral": 2, "qwen2_5_vl_vision": 2}
"""Vectors of a layer's norms and scales, where they are not four."""
_GATED = ("pixtral", "qwen2_5_vl_vision", "gemma4_vision")
"""Types of towers with a gate."""


def _two_layers(tower: Read, model: Read, width: int) -> int:
    """Two layers for the outputs of one layer of the tower, or of several."""
    seen, bias = model("vision_feature_layer"), bool(model("multimodal_projector_bias"))
    inputs = int(tower("hidden_size")) * (1 if isinstance(seen, int) else len(seen))
    return _linear(inputs, width, bias) + _linear(width, width, bias)


def _internvl_projector(tower: Read, model: Read, width: int) -> tuple[int, int]:
    inputs = int(tower("hidden_size")) * round(1 / model("downsample_ratio")) ** 2
    return 2 * inputs + _linear(inputs, width) + _linear(width, width), 2 * inputs


def _mistral3_projector(tower: Read, model: Read, width: int) -> tuple[int, int]:
    inputs = int(tower("hidden_size"))
    uncut = inputs + inputs**2 * int(model("spatial_merge_size")) ** 2
    return uncut + _two_layers(tower, model, width), uncut


def _merger(tower: Read, norm: int) -> int:
    """Norm of some vectors, and two layers for the patches of a place."""
    inputs = int(tower("hidden_size") * tower("spatial_merge_size") ** 2)
    return norm + _linear(inputs, inputs) + _linear(inputs, int(tower("out_hidden_size")))


def _qwen3_projector(tower: Read, model: Read, width: int) -> tuple[int, int]:
    norm, deep = 2 * int(tower("hidden_size")), len(tower("deepstack_visual_indexes") or ())
    deep_norm = norm * int(tower("spatial_merge_size")) ** 2
    return _merger(tower, norm) + deep * _merger(tower, deep_norm), norm + deep * deep_norm


def _whole(count: Callable[[Read, Read, int], int]) -> Projector:
    """A projector that tensor parallelism does not cut."""

    def parameters(tower: Read, model: Read, width: int) -> tuple[int, int]:
        number = count(tower, model, width)
        return number, number

    return parameters


_PROJECTORS: Mapping[str, Projector] = {
    "gemma3": _whole(lambda tower, model, width: int(tower("hidden_size")) * (width + 1)),
    "gemma4": _whole(lambda tower, model, width: int(tower("hidden_size")) * width),
    "internvl": _internvl_projector,
    "llava": lambda tower, model, width: (_two_layers(tower, model, width), 0),
    "mistral3": _mistral3_projector,
    "paligemma": _whole(lambda tower, model, width: _linear(int(tower("hidden_size")), width)),
    "qwen2_5_vl": _whole(lambda tower, model, width: _merger(tower, int(tower("hidden_size")))),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen3_projector),
    **dict.fromkeys(
        ("smolvlm", "idefics3"),
        _whole(lambda tower, model, width: int(tower("hidden_size") * model("scale_factor") ** 2) * width),
    ),
}
"""Parameters of the projector by type of the whole model."""
