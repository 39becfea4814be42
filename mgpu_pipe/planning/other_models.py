"""Parameters and bytes next to the trained decoder's weights: adapters, towers, teachers, and weights of four bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mgpu_pipe.architectures.family import CONFIGS, PROJECTOR
from mgpu_pipe.architectures.formulas.flops import Shape
from mgpu_pipe.architectures.formulas.parameters import count_parameters, experts_of, sizes_of
from mgpu_pipe.architectures.formulas.towers import vision_parameters
from mgpu_pipe.config.group_keys import ALL_LINEAR, PeftConfig
from mgpu_pipe.config.schema import ModelConfig, ObjectiveConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.fields import resolved_fields

WHOLE = (ALL_LINEAR, "language")
EXPERTS = "experts"
"""Values of ``peft.targets`` that mean all linear layers of the blocks, and the packed weights of experts."""
FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
NAMES: Mapping[str, Sequence[str]] = {
    "queries": ("q_proj", "q_lin", "query", *FUSED),
    "keys": ("k_proj", "k_lin", "key", *FUSED),
    "values": ("v_proj", "v_lin", "value", *FUSED),
    "output": ("o_proj", "out_proj", "dense", "c_proj"),
    "gate": ("gate_proj", "gate_up_proj", "w1"),
    "up": ("up_proj", "gate_up_proj", "w3", "fc1", "c_fc", "fc_in", "dense_h_to_4h"),
    "down": ("down_proj", "w2", "fc2", "c_proj", "fc_out", "dense_4h_to_h"),
}
"""Names that the families give to a block's linear layers."""


def adapter_parameters(peft: PeftConfig, fields: Mapping[str, Any]) -> float:
    """Parameters of a block's adapters: ``r`` for each input and output of a targeted layer, the mean over the blocks.

    Args:
        fields: see :func:`mgpu_pipe.models.fields.resolved_fields`.
    """
    total = 0.0
    length = peft.name == "dora"  # one for each output
    for name, (inputs, outputs) in _layers(fields).items():
        total += _share(peft.targets, name, fields) * (peft.r * (inputs + outputs) + length * outputs)
    if EXPERTS in peft.targets and experts_of(fields):
        width, inner = fields["hidden_size"], fields[sizes_of(fields).expert_width]
        total += experts_of(fields) * peft.r * ((width + 2 * inner) + (inner + width))
    return total


def adapted_share(targets: Sequence[str], fields: Mapping[str, Any]) -> float:
    """Share of the inputs and outputs of the blocks' linear layers in layers that ``peft.targets`` names, 0 to 1."""
    sizes = {name: inputs + outputs for name, (inputs, outputs) in _layers(fields).items()}
    return sum(_share(targets, name, fields) * size for name, size in sizes.items()) / sum(sizes.values())


def _layers(fields: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a block's linear layers; experts are packed and are none."""
    shape, sizes = Shape.from_fields(fields), sizes_of(fields)
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    layers = {
        "queries": (shape.width, queries),
        "keys": (shape.width, keys),
        "values": (shape.width, keys),
        "output": (queries, shape.width),
    }
    if experts_of(fields):
        return layers
    inner = fields.get(sizes.inner) or 4 * shape.width
    gate = {"gate": (shape.width, inner)} if sizes.gated else {}
    return {**layers, **gate, "up": (shape.width, inner), "down": (inner, shape.width)}


def _share(targets: Sequence[str], name: str, fields: Mapping[str, Any]) -> float:
    """Share of the blocks in which a layer of :data:`NAMES` is targeted; all where no target's name is known."""
    if any(target in WHOLE for target in targets) or not any(_names_layer(target, fields) for target in targets):
        return 1.0
    blocks = range(fields["num_hidden_layers"])
    return sum(any(_matches(target, name, block) for target in targets) for block in blocks) / len(blocks)


def _names_layer(target: str, fields: Mapping[str, Any]) -> bool:
    """Whether a target names some layer of a block, or a part without any."""
    if target in (EXPERTS, "vision", "audio", "projector"):
        return True
    return any(_matches(target, name, block) for name in NAMES for block in range(fields["num_hidden_layers"]))


def _matches(target: str, name: str, block: int) -> bool:
    part = "mlp" if name in ("gate", "up", "down") else "self_attn"
    paths = (f"model.layers.{block}.{part}.{each}" for each in NAMES[name])
    return any(fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}") for path in paths)


FOUR_BITS = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a four-bit weight with its share of the scales (arXiv:2305.14314): one of eight bits for 64 weights, and one
of fp32 for 256 of these."""
TOWERS = ("vision", "audio")
WIDTHS, DEPTHS = ("hidden_size", "embed_dim", "d_model"), ("num_hidden_layers", "depth", "encoder_layers")


def four_bits(peft: PeftConfig) -> float:
    """Bytes of a frozen weight in the blocks under ``peft=qlora``, else 0."""
    return FOUR_BITS if peft.name == "qlora" else 0.0


def tower_parameters(fields: Mapping[str, Any]) -> dict[str, float]:
    """Parameters of a multimodal model's parts next to the language model; of an unknown tower, those of its usual
    layers."""
    vision = vision_parameters(fields)
    if vision is not None:
        return {"vision": vision.total - vision.projector, PROJECTOR: vision.projector}
    return {part: _usual_parameters(fields.get(CONFIGS[part])) for part in TOWERS}


def uncut_parameters(fields: Mapping[str, Any], whole: Sequence[str]) -> dict[str, float]:
    """Parameters of :func:`tower_parameters` that every tensor-parallel rank has; ``whole`` parts are not cut."""
    vision = vision_parameters(fields)
    uncut = {} if vision is None else {"vision": vision.uncut_tower, PROJECTOR: vision.uncut_projector}
    return {part: size if part in whole else uncut.get(part, 0.0) for part, size in tower_parameters(fields).items()}


def trained_apart(towers: Mapping[str, float], freeze: Sequence[str], peft: PeftConfig) -> float:
    """Parameters of ``towers`` that train although the language model does not, less those of which the opposite is
    true."""
    also = set(peft.train_also) if peft.name != "none" else {"language", *towers} - set(freeze)
    trained = set() if "*" in freeze else also
    return sum(size * ((part in trained) - ("language" in trained)) for part, size in towers.items())


def _usual_parameters(tower: Any) -> float:
    """Four squared widths of attention and two matrices a layer; 0 without a tower."""
    if not isinstance(tower, Mapping):
        return 0.0
    width, depth = (next((tower[key] for key in keys if key in tower), 0) for keys in (WIDTHS, DEPTHS))
    inner = tower.get("intermediate_size") or 4 * width
    return float(depth * (4 * width**2 + 2 * width * inner))


def other_bytes(objective: ObjectiveConfig, item: int, shards: int) -> float:
    """Bytes of a teacher on a rank, ``item`` a weight, over ``shards`` if sharded; a reference needs none in a step."""
    divided = shards if getattr(objective, "teacher_strategy", "whole") == "fsdp" else 1
    return item * _teacher_parameters(objective) / divided


def other_passes(objective: ObjectiveConfig, fields: Mapping[str, Any]) -> float:
    """Forward passes of a live reference or a teacher for each micro-batch, in forward passes of the model."""
    count = count_parameters(fields)
    teacher = _teacher_parameters(objective) / count.active if count is not None else 0.0
    return teacher + float(getattr(objective, "reference", "") == "live")


def _teacher_parameters(objective: ObjectiveConfig) -> int:
    """Parameters of the teacher in a folder; 0 without any, or where its shapes are not known."""
    folder = getattr(objective, "teacher", "")
    if not folder or folder in ("drawn", "starts_from"):
        return 0
    try:
        count = count_parameters(resolved_fields(ModelConfig(path=folder)))
    except BadInputError:  # another check refuses it
        return 0
    return 0 if count is None else count.total
