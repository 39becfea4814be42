"""BLOOM."""

from mgpu_pipe.architectures.family import Family, Stages

FAMILY = Family(
    stages=Stages("word_embeddings", "h", "ln_f", after_embedding=("word_embeddings_layernorm",), tuples=True),
    tensor_if=({"slow_but_exact": False},),
    modules={
        "BloomAttention": {"query_key_value": "grouped", "dense": "row", "alibi": "per_head"},
        "BloomMLP": {"dense_h_to_4h": "column", "dense_4h_to_h": "row"},
    },
)
