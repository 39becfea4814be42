"""Keeps attention inside documents: what a model's forward pass is given for a packed micro-batch.

Positions restart with every document. Most families of transformers read the boundaries from that and build the
block-diagonal mask themselves (``masking_utils.find_packed_sequence_indices``), as long as they get no attention mask
and no cache. A few need the mask from here; the rest cannot be packed (state space layers, convolutions, positions
that are no input). The tables hold what the tests try; a family in neither counts as one that cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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

Isolation = Literal["position_ids", "mask", "none"]


def document_isolation(model_type: str, fields: Mapping[str, Any]) -> Isolation:
    """How documents of one row are kept apart in a model of that family; ``none``: they cannot be.

    Args:
        fields: of the model's configuration.
    """
    if fields.get(UNPACKED.get(model_type, "")):
        return "none"
    if model_type in BY_POSITION_IDS:
        return "position_ids"
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
    if packing == "none" or isolation == "position_ids":
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


def forward_kwargs(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Keyword arguments of ``model(...)`` (or of its base model) for one micro-batch; labels are left out.

    Args:
        batch: ``input_ids`` and ``position_ids`` of shape (rows, seq_len), see :class:`StepBatch`.

    Returns:
        ``input_ids``, ``use_cache=False`` and what keeps documents apart. Under flash attention the rows are laid end
        to end, shape (1, rows * seq_len), for transformers finds packed documents only in a batch of one; outputs
        then have that shape too, and ``labels.reshape(1, -1)`` or any reshape to tokens fits them.
    """
    input_ids, position_ids = batch["input_ids"], batch["position_ids"]
    isolation = document_isolation(model.config.model_type, vars(model.config))
    kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if isolation == "none":
        return kwargs
    if model.config._attn_implementation in FLASH:
        return {**kwargs, "input_ids": input_ids.reshape(1, -1), "position_ids": position_ids.reshape(1, -1)}
    kwargs["position_ids"] = position_ids
    if isolation == "mask":
        kwargs["attention_mask"] = block_diagonal_mask(position_ids, model.config._attn_implementation == "sdpa")
    return kwargs


def block_diagonal_mask(position_ids: torch.Tensor, as_bool: bool) -> torch.Tensor:
    """Causal mask inside documents, shape (rows, 1, seq_len, seq_len).

    Args:
        position_ids: shape (rows, seq_len); a document begins wherever it does not go up by one.
        as_bool: True where visible (for sdpa), else additive fp32: 0 where visible (for eager attention).
    """
    import torch

    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=-1) != 1
    document = starts.cumsum(-1)
    length = position_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    visible = ((document[:, :, None] == document[:, None, :]) & causal)[:, None]
    if as_bool:
        return visible
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, torch.finfo(torch.float32).min)
