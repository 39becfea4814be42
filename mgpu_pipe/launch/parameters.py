"""Number of parameters of the common decoder families in closed form, without torch.

Verified in the tests against the models themselves, built on the meta device. Other families give None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]


def parameter_count(fields: Fields) -> int | None:
    """Parameters of a causal language model, tied ones counted once; None where there is no formula.

    Args:
        fields: the model's configuration with ``model_type`` and the standard names (``hidden_size``, ...).
    """
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        return None
    try:
        return family(fields)
    except (KeyError, TypeError):  # a field that is not given and whose default the source does not tell
        return None


def _gpt2(fields: Fields) -> int:
    width, layers = fields["n_embd"], fields["n_layer"]
    inner = fields.get("n_inner") or 4 * width
    attention = 4 * width * width + 4 * width
    mlp = 2 * width * inner + inner + width
    embeddings = (fields["vocab_size"] + fields["n_positions"]) * width
    head = 0 if fields.get("tie_word_embeddings", True) else fields["vocab_size"] * width
    return int(embeddings + head + layers * (attention + mlp + 4 * width) + 2 * width)


def _llama(fields: Fields) -> int:
    bias = 1 if fields.get("mlp_bias") else 0
    width, inner = fields["hidden_size"], fields["intermediate_size"]
    mlp = 3 * width * inner + bias * (2 * inner + width)
    return _decoder(fields, [mlp] * fields["num_hidden_layers"], query_key_norms=False)


def _qwen3(fields: Fields) -> int:
    mlp = 3 * fields["hidden_size"] * fields["intermediate_size"]
    return _decoder(fields, [mlp] * fields["num_hidden_layers"], query_key_norms=True)


def _mixtral(fields: Fields) -> int:
    width, experts = fields["hidden_size"], fields["num_local_experts"]
    mlp = experts * 3 * width * fields["intermediate_size"] + experts * width
    return _decoder(fields, [mlp] * fields["num_hidden_layers"], query_key_norms=False)


def _qwen3_moe(fields: Fields) -> int:
    width, experts = fields["hidden_size"], fields.get("num_experts") or fields["num_local_experts"]
    sparse = experts * 3 * width * fields["moe_intermediate_size"] + experts * width
    dense = 3 * width * fields["intermediate_size"]
    dense_layers, every = fields.get("mlp_only_layers") or [], fields["decoder_sparse_step"]
    mlps = [
        sparse if layer not in dense_layers and experts > 0 and (layer + 1) % every == 0 else dense
        for layer in range(fields["num_hidden_layers"])
    ]
    return _decoder(fields, mlps, query_key_norms=True)


def _decoder(fields: Fields, mlps: list[int], query_key_norms: bool) -> int:
    """A decoder of pre-norm layers with RMS norms, grouped attention and the given MLP sizes."""
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    key_value = fields.get("num_key_value_heads") or heads
    head_dim = fields.get("head_dim") or width // heads
    attention = 2 * width * heads * head_dim + 2 * width * key_value * head_dim
    if fields.get("attention_bias"):
        attention += heads * head_dim + 2 * key_value * head_dim + width
    norms = 2 * width + (2 * head_dim if query_key_norms else 0)
    matrices = 1 if fields.get("tie_word_embeddings") else 2
    return int(matrices * fields["vocab_size"] * width + sum(attention + norms + mlp for mlp in mlps) + width)


FAMILIES: dict[str, Callable[[Fields], int]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "qwen3": _qwen3, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
}
