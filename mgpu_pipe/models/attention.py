"""Which families keep attention inside the documents of a packed sample, and how.

Positions restart with every document. Most families of transformers read the boundaries from that and build the
block-diagonal mask themselves (``masking_utils.find_packed_sequence_indices``), as long as they get no attention mask
and no cache. A few need the mask from here; the rest cannot be packed (state space layers, convolutions, positions
that are no input). The tables hold what the tests try; a family in neither counts as one that cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mgpu_pipe.errors import ConfigError

BY_POSITION_IDS = frozenset(
    [
        "arcee",
        "cohere",
        "cohere2",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    ]
)
"""Families that keep restarted positions apart by themselves."""
BY_MASK = frozenset(["biogpt", "falcon", "mpt", "opt", "xglm"])
"""Families that need the block-diagonal mask."""
UNPACKED = {"falcon": "alibi"}
"""A boolean of the configuration under which such a family cannot be packed: Falcon counts the positions of ALiBi's
biases by a mask of another shape than the block-diagonal one."""
FLASH = ("flash_attention_2", "flash_attention_3")

Isolation = Literal["positions", "mask", "none"]


def document_isolation(model_type: str, fields: Mapping[str, Any]) -> Isolation:
    """How documents of one row are kept apart in a model of that family; ``none``: they cannot be.

    Args:
        fields: of the model's configuration.
    """
    if fields.get(UNPACKED.get(model_type, "")):
        return "none"
    if model_type in BY_POSITION_IDS:
        return "positions"
    return "mask" if model_type in BY_MASK else "none"


def check_packing(fields: Mapping[str, Any], packing: str, attn_implementation: str = "auto") -> None:
    """Raise where documents of a packed sample would see each other. Needs no torch.

    Args:
        fields: of the model's configuration, its ``model_type`` among them.

    Raises:
        ConfigError: ``data.packing`` packs, and the family (or its flash attention) cannot keep documents apart.
    """
    model_type = str(fields["model_type"])
    isolation = document_isolation(model_type, fields)
    if packing == "none" or isolation == "positions":
        return
    if isolation == "none":
        setting = UNPACKED.get(model_type)
        having = f" with {setting}=true" if setting else ""
        raise ConfigError(
            "data.packing",
            packing,
            "use data.packing=none",
            f"attention of the {model_type} family{having} is not known to stay inside documents of a packed sample",
        )
    if attn_implementation in FLASH:
        raise ConfigError(
            "model.attn_implementation",
            attn_implementation,
            "use sdpa, or data.packing=none",
            f"the {model_type} family needs a mask for packed samples, which flash attention does not take",
        )
