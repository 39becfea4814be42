"""Every causal language model of transformers in its variants, small; and why some cannot be tried."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from mgpu_pipe.architectures.config_source import NO_DEFAULT, ConfigClass, config_class
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.shrink_model import shrink_model
from tests.families.published import PUBLISHED

SEQ_LEN = 24
MOST = 16
"""Variants of a family."""
NOT_MATHEMATICS = frozenset(
    [
        *("output_hidden_states", "output_attentions", "output_router_logits", "return_dict", "return_last_states"),
        *("use_cache", "is_encoder_decoder", "summary_use_proj", "summary_proj_to_labels", "classifier_bias"),
        *("use_mems_eval", "use_mems_train", "add_cross_attention", "slow_but_exact", "use_mamba_kernels"),
    ]
)
"""Booleans that change what a forward pass returns or keeps, not what it computes for a causal language model."""
NOT_ALONE = {
    "whisper": "a decoder that attends to audio",
    "moshi": "a decoder of audio codes beside text",
    "musicgen": "a decoder of audio codes",
    "musicgen_melody": "a decoder of audio codes",
    "trocr": "a decoder that attends to an image",
    "git": "reads images",
    "mllama": "reads images",
    "phi4_multimodal": "reads images and audio",
    "blt": "reads bytes in patches, by a model of its own",
    "gemma4_assistant": "drafts for another model, whose states it reads",
    "gemma4_unified_assistant": "drafts for another model, whose states it reads",
}
"""Families that are no text model by themselves."""


@dataclass(frozen=True)
class Variant:
    """One cell's model: the family with some fields set."""

    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or ",".join(f"{key}={_short(value)}" for key, value in self.fields.items()) or "as shipped"


def _short(value: object) -> str:
    return str(value.get("rope_type")) if isinstance(value, Mapping) else str(value).lower()


def not_tried(family: str) -> str | None:
    """Why a family is no text model that can be made small; None where it can."""
    if family in NOT_ALONE:
        return NOT_ALONE[family]
    known = config_class(family)
    if known is None:
        return "transformers has no configuration class for it where the others have theirs"
    parts = sorted(name for name in known.annotations if name.endswith("_config") and "quant" not in name)
    nested = [name for name in parts if name not in ("per_layer_config", "attn_config", "ffn_config")]
    return f"made of several models ({', '.join(nested)})" if nested else None


def variants(family: str) -> list[Variant]:
    """The family as its class has it by default, with every boolean the other way, in all combinations where those
    are few; with rotary tables that depend on the length; and as its maker published it.

    Where the defaults see later tokens, all but the first are of the family made causal.
    """
    known = config_class(family) or ConfigClass()
    flips = {name: not default for name, default in _booleans(known)}
    decides = family_of(family).causal_if
    base = {decides: True} if decides else {}
    flips = {name: value for name, value in flips.items() if name not in base}
    rotary = list(_rotary(known))
    published = [Variant(family, fields, f"published: {name}") for name, fields in PUBLISHED.get(family, {}).items()]
    room = MOST - len(rotary) - len(published) - bool(base)
    if 2 ** len(flips) <= room:
        chosen = [dict(pairs) for pairs in _subsets(flips)]
    else:
        chosen = [{}, *({name: value} for name, value in flips.items())][:room]
    found = [Variant(family, {**base, **fields}) for fields in chosen]
    found += [Variant(family, {**base, **fields}) for fields in rotary]
    return [*([Variant(family)] if base else []), *found, *published]


def _booleans(known: ConfigClass) -> Iterator[tuple[str, bool]]:
    for name, annotation in known.annotations.items():
        if "bool" not in ast.unparse(annotation) or name in NOT_MATHEMATICS:
            continue
        default = known.defaults.get(name, NO_DEFAULT)
        if isinstance(default, bool) or default is None:
            yield name, bool(default)


def _subsets(flips: Mapping[str, bool]) -> Iterator[list[tuple[str, bool]]]:
    for taken in product((False, True), repeat=len(flips)):
        yield [pair for pair, one in zip(flips.items(), taken, strict=True) if one]


def _rotary(known: ConfigClass) -> Iterator[dict[str, Any]]:
    """longrope with a border inside of the sequence; none where tables stand for each kind of layer."""
    default = known.defaults.get("rope_parameters", NO_DEFAULT)
    if "rope_parameters" in known.annotations and (default is None or default is NO_DEFAULT):
        yield {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": SEQ_LEN // 2,
            }
        }


def small(variant: Variant, tp: int = 1, stages: int = 1) -> ModelConfig:
    """The variant as ``mgpu-pipe verify`` makes it small, for so many stages of a pipeline."""
    given = dict(variant.fields)
    rope = given.pop("rope_parameters", None)
    fields = {**EXTRA.get(variant.family, {}), **given}
    for name, more in NEEDED_WITH.items():
        fields |= more if fields.get(name) else {}
    model = ModelConfig(name=variant.family, type=variant.family, config=fields)
    dims = ParallelDims(tp=tp)
    made = shrink_model(model, dims, SEQ_LEN, stages)
    made.config.update(rope_type_of(made, rope) if rope else {})
    return made


def rope_type_of(made: ModelConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Longrope's factors for the rotary width of the small model, which building it alone tells."""
    from mgpu_pipe.models.build import build_meta

    plain = build_meta(made)
    own = getattr(plain.config, "rope_parameters", None) or {}
    kinds = [kind for kind, entry in own.items() if isinstance(entry, Mapping)]
    found: dict[str, Any] = {}
    if kinds:
        held = [kind for kind in kinds if any(hasattr(module, f"{kind}_inv_freq") for module in plain.modules())]
        tables = {kind: _longrope(plain, rope, own[kind], f"{kind}_inv_freq") for kind in held}
        if not held:
            raise ValueError(f"no rotary table of {' or '.join(kinds)}")
        found["rope_parameters"] = {**own, **tables}
    else:
        found["rope_parameters"] = _longrope(plain, rope, own, "inv_freq")
        if hasattr(plain.config, "original_max_position_embeddings"):
            found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if vars(plain.config).get("head_dim", 0) is None:
        found["head_dim"] = plain.config.hidden_size // plain.config.num_attention_heads
    return found


def _longrope(plain: Any, rope: Mapping[str, Any], own: Mapping[str, Any], table: str) -> dict[str, Any]:
    widths = {getattr(module, table).numel() for module in plain.modules() if hasattr(module, table)}
    if len(widths) != 1:
        raise ValueError(f"{len(widths)} rotary tables {table}")
    short = [1.0 + 0.1 * index for index in range(widths.pop())]
    kept = {name: value for name, value in own.items() if name not in rope and name != "max_position_embeddings"}
    scales = {"short_mscale": 1.1, "long_mscale": 1.3} if plain.config.model_type == "phimoe" else {}
    return {**kept, **rope, **scales, "short_factor": short, "long_factor": [4.0 * value for value in short]}


EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2, "num_attention_heads": 4},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2},
    "xmod": {"default_language": "en_XX"},
}
"""Fields given before a family is made small: those that it needs and has no default for."""
NEEDED_WITH = {"enable_moe_block": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}}
"""Fields that go with a boolean which is off by default."""
