"""Adapters of a decoder's blocks: the linear layers that ``peft.targets`` names, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mgpu_pipe.architectures.formulas.flops import Shape
from mgpu_pipe.architectures.formulas.parameters import experts_of, sizes_of
from mgpu_pipe.config.group_keys import ALL_LINEAR, PeftConfig

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
    """Share of the inputs and outputs of the blocks' linear layers that belong to layers with adapters, 0 to 1.

    Args:
        targets: ``peft.targets``.
        fields: see :func:`mgpu_pipe.models.fields.resolved_fields`.
    """
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
