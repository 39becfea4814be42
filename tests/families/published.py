"""What makers published: fields of their config.json, by family and name. Sizes are cut by the sweep."""

from __future__ import annotations

from typing import Any

PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "gpt_neox": {
        "Pythia": {
            **{"hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True},
            **{"layer_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0},
        },
        "GPT-NeoX-20B": {
            **{"hidden_act": "gelu_fast", "rotary_pct": 0.25, "rotary_emb_base": 10000, "attention_dropout": 0.0},
            **{"hidden_dropout": 0.0, "is_decoder": True, "tie_word_embeddings": False},
        },
    }
}
