"""Shrinks a model but keeps its architecture and divisibility.

Everything that decides how a strategy cuts the model stays: the family, the ratio of heads to key-value heads, tied
weights, the kinds of layers, whether the vocabulary divides by the tensor-parallel size. Sizes are reduced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any

from mgpu_pipe.architectures.config_source import ConfigClass, config_class
from mgpu_pipe.architectures.find import family_of, recordings_of, sight_of
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.fields import CAUSAL as IS_CAUSAL
from mgpu_pipe.models.fields import TEXT, config_fields, given_fields, is_noise, model_types, part_type, resolved_fields
from mgpu_pipe.topology import ParallelDims

WIDTH, HEAD_DIM, FEED_FORWARD, VOCABULARY, LAYERS, EXPERTS, EXPERTS_PER_TOKEN = 32, 8, 48, 96, 2, 4, 2
FEED_FORWARDS = (
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "ffn_hidden_size",
    "n_inner",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
LATENTS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
"""Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
STATES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("mamba_d_state", "ssm_state_size", "state_size"), 8),
    (("mamba_chunk_size", "chunk_size"), 8),
    (("linear_num_key_heads", "linear_num_heads"), 2),
    (("linear_num_value_heads",), 4),
    (("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
)
"""Fields of state space layers and linear attention, with their largest values."""
STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("num_heads", "head_dim"))
"""Fields of the heads of state space layers, together as wide as the expanded hidden states."""
AUDIO = "audio_config"
TOWERS = (TEXT, "vision_config", AUDIO)
CAUSAL = "AutoModelForCausalLM"
PATCH, PATCHES = 4, 4
"""Pixels of a patch, and patches across a picture."""
PATCHES_IN_TEXT = 2
"""Patches across a picture in a text."""
CHUNK = 4
"""Half the frames of a chunk of a recording."""
POSITIONS, BANDS = 16, 8
"""Positions and bands of an encoder of spectrograms."""
CONVOLUTION = 16
"""Channels of the convolutions of a waveform encoder."""
TOKEN_IDS = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "image_token_index", "image_token_id"),
    *("video_token_id", "cls_token_id", "sep_token_id", "audio_token_index", "audio_token_id"),
)


def shrink_model(
    model: ModelConfig, dims: ParallelDims, seq_len: int, stages: int = 1, model_class: str = CAUSAL
) -> ModelConfig:
    """Small model without dropout, with random weights even if ``model`` is a folder.

    Args:
        seq_len: tokens per sample of the small run.
        stages: pipeline stages, which get equally many layers.
        model_class: transformers' ``AutoModelFor...`` to train. The causal language model of a folder with several
            parts is its text part; other classes keep all parts.

    Raises:
        ModelFolderError: ``model.path`` has no readable ``config.json``.
    """
    model_type, source = _type_and_fields(model, model_class)
    known = config_class(model_type) or ConfigClass()
    class_names = known.attribute_map
    spelled = {class_names.get(name, name): name for name in source}
    fields = resolved_fields(ModelConfig(type=model_type, config=source))
    if isinstance(fields.get("num_attention_heads"), list | tuple):  # one value per stage: keep sizes and layers
        noiseless = {class_names.get(name, name): value for name, value in _dropouts(fields).items()}
        return replace(model, path=None, type=model_type, config={**source, **noiseless})
    takes = known.names | set(source)
    wanted = _small_sizes(fields, takes, dims, seq_len, stages)
    changed = {class_names.get(name, name): value for name, value in wanted.items() if name in takes}
    changed.update(_small_towers(known, model_type, source, dims, seq_len, stages))
    _fit_pictures(changed, known, model_type, stages)
    changed = {spelled.get(name, name): value for name, value in changed.items()}
    implementation = "auto" if model.attn_implementation == "flash_attention_2" else model.attn_implementation
    return ModelConfig(
        name=model.name,
        type=model_type,
        config={**source, **changed},
        attn_implementation=implementation,
        freeze=in_fewer_layers(model.freeze, int(wanted["num_hidden_layers"])),
        compile=model.compile,
        bidirectional=given_fields(model).get(IS_CAUSAL, True) is False,
    )


def _small_sizes(
    fields: Mapping[str, Any], takes: set[str], dims: ParallelDims, seq_len: int, stages: int
) -> dict[str, Any]:
    """Small values of the fields of one part of a model, by transformers' usual names."""
    wanted: dict[str, Any] = {}
    for part in (
        _attention(fields, dims),
        _feed_forward(fields, dims),
        _experts(fields, dims),
        _layers(fields, stages),
        _vocabulary(fields, dims),
        _positions(fields, takes, seq_len),
        _dropouts(fields),
    ):
        wanted.update(part)
    wanted.update(_state_space(fields, int(wanted["hidden_size"])))
    wanted.update(_rope(fields, wanted))
    sides = [fields.get(name) for name in ("patch_size", "image_size")]
    pixels, size = (side[0] if isinstance(side, list | tuple) else side for side in sides)
    if isinstance(pixels, int) and isinstance(size, int) and "patch_stride" not in fields:  # patches that overlap
        patch = min(pixels, PATCH)
        wanted.update(patch_size=patch, image_size=patch * min(size // pixels, PATCHES))
    if isinstance(fields.get("conv_dim"), list | tuple):
        wanted["conv_dim"] = [min(size, CONVOLUTION) for size in fields["conv_dim"]]
    if isinstance(fields.get("frequency_stride"), int):  # patches of a spectrogram
        wanted.update(patch_size=PATCH, frequency_stride=PATCH // 2, time_stride=PATCH // 2, max_length=POSITIONS)
    for name, most in (("max_source_positions", POSITIONS), ("num_mel_bins", BANDS)):
        if isinstance(fields.get(name), int):
            wanted[name] = min(fields[name], most)
    if isinstance(fields.get("projection_dim"), int):
        wanted["projection_dim"] = min(fields["projection_dim"], WIDTH)
    return wanted


def _small_towers(
    known: ConfigClass, model_type: str, source: Mapping[str, Any], dims: ParallelDims, seq_len: int, stages: int
) -> dict[str, Any]:
    """Small configurations of the parts of a model that has several, by their names."""
    towers: dict[str, Any] = {}
    for name in TOWERS:
        if name == AUDIO and name not in source and not recordings_of(model_type, None):
            continue  # transformers builds no tower for recordings where its configuration is missing
        part = dict(source.get(name) or {})
        tower, tower_type = part_type(model_type, name, part), part.pop("model_type", None)
        if name in known.names and config_class(tower):
            cut = stages if name == TEXT else 1
            small = shrink_model(ModelConfig(type=tower, config=part), dims, seq_len, cut).config
            towers[name] = {**small, "model_type": tower_type} if tower_type else small
    return towers


def _fit_pictures(changed: dict[str, Any], known: ConfigClass, model_type: str, stages: int) -> None:
    """Set the sizes of pictures in ``changed`` that depend on the small parts."""
    audio, recordings = changed.get("audio_config", {}), family_of(model_type).recordings
    if "output_dim" in audio:
        audio["output_dim"] = changed[TEXT]["hidden_size"]
    if recordings == "chunks":  # several of a recording
        audio["n_window"] = CHUNK
    if recordings == "silence":  # whole vectors of joined ones
        audio["intermediate_size"] = 2 * audio["hidden_size"]
    if "image_size" in changed.get("vision_config", {}) and "image_token_index" in known.names:
        # Several pictures fit into a row.
        vision = changed["vision_config"]
        vision["image_size"] = min(vision["image_size"], PATCHES_IN_TEXT * vision["patch_size"])
    if {"image_token_index", "projection_dim"} <= known.names:  # the width after the projector
        changed["projection_dim"] = changed[TEXT]["hidden_size"]
    if "mm_tokens_per_image" in known.names:
        changed["mm_tokens_per_image"] = 1
    if "scale_factor" in known.names:  # it divides the patches across
        changed["scale_factor"] = 2
    if sight_of(model_type).pictures == "canvas":
        vision = changed["vision_config"]  # the shuffled patches of a vector are as wide as the feed-forward layer
        vision["intermediate_size"] = round(vision["hidden_size"] / vision.get("pixel_shuffle_ratio", 0.5) ** 2)
        vision |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), WIDTH)
    if sight_of(model_type).pictures == "mosaic":
        vision = changed["vision_config"]
        vision["image_size"] = vision["crop_size"] = PATCHES_IN_TEXT * int(vision["patch_size"])
    if "depth" in changed.get("vision_config", {}):
        changed["vision_config"] = _native_size_tower(changed, int(changed[TEXT]["num_hidden_layers"]) // stages)


def _native_size_tower(model: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Small tower of pictures in native size; the tower's output may be added after the ``first`` layers."""
    vision = dict(model["vision_config"])
    merge, layers = int(vision.get("spatial_merge_size", 2)), int(vision["depth"])
    vision["patch_size"] = min(int(vision.get("patch_size", PATCH)), PATCH)
    vision["out_hidden_size"] = model[TEXT]["hidden_size"]
    sizes = {
        "window_size": 2 * merge * vision["patch_size"],
        "fullatt_block_indexes": [layers - 1],
        "deepstack_visual_indexes": list(range(layers))[-first:],
    }
    return {**vision, **{name: value for name, value in sizes.items() if name in vision}}


def _type_and_fields(model: ModelConfig, model_class: str) -> tuple[str, dict[str, Any]]:
    """Model type, and its source fields that its classes know."""
    source = given_fields(model)
    nested = source.get(TEXT)
    if (
        model.path is not None
        and model_class == CAUSAL
        and isinstance(nested, Mapping)
        and nested.get("model_type") in model_types(CAUSAL)
    ):
        source = dict(nested)
    model_type = str(source.get("model_type", model.type))
    return model_type, _known_fields(model_type, source)


def _known_fields(model_type: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``source`` that the configuration class knows, for parts too."""
    known = config_fields(model_type)
    fields = {name: value for name, value in source.items() if known is None or name in known}
    for name, part in fields.items():
        if name.endswith("_config") and isinstance(part, Mapping):
            kind = part_type(model_type, name, part)
            fields[name] = {**_known_fields(kind, part), **({"model_type": kind} if "model_type" in part else {})}
    return fields


def in_fewer_layers(patterns: list[str], layers: int) -> list[str]:
    """Patterns of parameter names with layer numbers of the small model."""
    return [re.sub(r"(?<=\.)\d+(?=\.|$)", lambda match: str(int(match[0]) % layers), text) for text in patterns]


def _attention(fields: Mapping[str, Any], dims: ParallelDims) -> dict[str, Any]:
    """Fields of the small model's width and heads: about :data:`WIDTH`, with as many heads as ``dims`` needs."""
    heads = int(fields.get("num_attention_heads") or 1)
    key_value = int(fields.get("num_key_value_heads") or fields.get("num_kv_heads") or heads)
    cut = dims.tp * dims.cp if key_value % (dims.tp * dims.cp) == 0 else dims.tp
    if heads % key_value == 0 and key_value % cut == 0:
        ratio = heads // key_value
        key_value = _multiple(lcm(cut, family_of(str(fields.get("model_type"))).heads_together), min(key_value, 2))
        heads = key_value * ratio
    # A model that only looks it up may derive other sizes from width / heads.
    has_head_dim = isinstance(fields.get("head_dim"), int)
    width = _multiple(lcm(8, dims.tp, heads), WIDTH)
    if not has_head_dim:
        width = heads * _multiple(8, -(-WIDTH // heads))
    elif fields["head_dim"] * int(fields.get("num_attention_heads") or 1) == fields.get("hidden_size"):
        width = heads * HEAD_DIM  # some families need it
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        **({"decoder_attention_heads": heads} if "decoder_attention_heads" in fields else {}),
        "hidden_size": width,
        **({"head_dim": HEAD_DIM} if has_head_dim else {}),
        "word_embed_proj_dim": width,
        "embedding_size": width,
    }
    for name in ("num_key_value_heads", "num_kv_heads"):
        if fields.get(name) is not None:
            sizes[name] = key_value
    head_dim = HEAD_DIM if has_head_dim else width // heads
    if isinstance(fields.get("rotary_dim"), int):
        sizes["rotary_dim"] = min(fields["rotary_dim"], head_dim)
    for name, value in LATENTS.items():
        if fields.get(name) is not None:
            sizes[name] = value
    return sizes


def _feed_forward(fields: Mapping[str, Any], dims: ParallelDims) -> dict[str, Any]:
    size = _multiple(lcm(8, dims.tp), FEED_FORWARD)
    return {name: min(size, fields[name]) for name in FEED_FORWARDS if isinstance(fields.get(name), int)}


def _experts(fields: Mapping[str, Any], dims: ParallelDims) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    taken = 1
    for name in EXPERTS_TAKEN:
        if isinstance(fields.get(name), int):
            taken = sizes[name] = min(fields[name], EXPERTS_PER_TOKEN)
    for name in EXPERT_COUNTS:
        count = fields.get(name)
        if isinstance(count, int) and count > 1:
            groups = fields.get("n_group") or 1
            fewest = max(taken, min(count, EXPERTS))
            divides = count % dims.ep == 0
            sizes[name] = _multiple(lcm(dims.ep if divides else 1, groups), max(fewest, 2 * groups))
    return sizes


def _state_space(fields: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Sizes of state space layers and linear attention: the same groups, small states and chunks."""
    sizes = {
        name: min(fields[name], size) for names, size in STATES for name in names if isinstance(fields.get(name), int)
    }
    expansion = fields.get("mamba_expand") or fields.get("expand")
    inner = int(expansion or 2) * width
    for heads, head_dim in STATE_HEADS if expansion else ():
        if isinstance(fields.get(heads), int) and fields.get(head_dim) is not None:
            sizes.update({heads: inner // HEAD_DIM, head_dim: HEAD_DIM})
    if isinstance(fields.get("mamba_d_ssm"), int):
        sizes["mamba_d_ssm"] = inner
    return sizes


def _layers(fields: Mapping[str, Any], stages: int) -> dict[str, Any]:
    layers = int(fields.get("num_hidden_layers") or LAYERS)
    lists = {
        name: list(value)
        for name, value in fields.items()
        if isinstance(value, list | tuple) and "layer" in name and len(value) == layers
    }
    kinds = max((len(set(value)) for value in lists.values()), default=1)
    sparse_step = fields.get("decoder_sparse_step") or 1
    count = _multiple(stages, min(layers, max(LAYERS, kinds, sparse_step)))
    sizes: dict[str, Any] = {"num_hidden_layers": count}
    for name in ("num_decoder_layers", "decoder_layers"):
        if isinstance(fields.get(name), int):
            sizes[name] = min(fields[name], LAYERS)
    for name, value in lists.items():
        # All kinds of layers stay, in order of first appearance.
        order = list(dict.fromkeys(value))
        sizes[name] = [order[index % len(order)] for index in range(count)]
    if isinstance(fields.get("mlp_only_layers"), list):
        sizes["mlp_only_layers"] = [index for index in fields["mlp_only_layers"] if index < count]
    for name in ("first_k_dense_replace", "max_window_layers"):
        if isinstance(fields.get(name), int):
            sizes[name] = min(fields[name], count - 1)
    return sizes


def _vocabulary(fields: Mapping[str, Any], dims: ParallelDims) -> dict[str, Any]:
    size = _multiple(lcm(8, dims.tp), VOCABULARY)
    if int(fields.get("vocab_size") or size) % dims.tp:
        size += 1  # like the configured one, it does not divide
    sizes: dict[str, Any] = {"vocab_size": size, "vocab_size_per_layer_input": size}
    for name in TOKEN_IDS:
        value = fields.get(name)
        if isinstance(value, int) and value >= size:
            # A padding token stays, since its embedding gets no gradient.
            sizes[name] = size - 1 - TOKEN_IDS.index(name)
        elif isinstance(value, list):
            sizes[name] = size - 1 - TOKEN_IDS.index(name)
    return sizes


def _positions(fields: Mapping[str, Any], takes: set[str], seq_len: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for name in (
        *(["sliding_window"] if fields.get("use_sliding_window", True) else []),
        "sliding_window_size",
        "local_attention",
        "attention_window_size",
        "window_size",
        "floor_scale",
        "attention_chunk_size",
    ):
        if isinstance(fields.get(name), int) and fields[name] > seq_len // 2:
            sizes[name] = max(1, seq_len // 2)
    positions = fields.get("max_position_embeddings")
    if isinstance(positions, int) and "rope_parameters" not in takes:
        sizes["max_position_embeddings"] = min(positions, 2 * seq_len)  # a table of learned positions
    return sizes


def _dropouts(fields: Mapping[str, Any]) -> dict[str, Any]:
    random = [name for name in fields if is_noise(name)]
    return {name: 0.0 for name in random if isinstance(fields[name], float) and fields[name] > 0}


def _rope(fields: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary factors per frequency, cut to the small head."""
    sizes: dict[str, Any] = {}
    head_dim = int(wanted.get("head_dim") or wanted["hidden_size"] // wanted["num_attention_heads"])
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if isinstance(value, Mapping) and any(isinstance(entry, list) for entry in value.values()):
            sizes[name] = {
                key: entry[: head_dim // 2] if isinstance(entry, list) else entry for key, entry in value.items()
            }
            if "mrope_section" in value:  # frequencies of three axes
                share = head_dim // 2 // 3
                sizes[name]["mrope_section"] = [head_dim // 2 - 2 * share, share, share]
    return sizes


def _multiple(unit: int, at_least: int) -> int:
    """Smallest multiple of ``unit`` that is at least ``at_least``."""
    return -(-at_least // unit) * unit
