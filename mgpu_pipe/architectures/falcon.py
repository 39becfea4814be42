"""Falcon: counts the positions of ALiBi's biases by a mask of another shape than the block-diagonal one.

Tensor parallelism cuts neither the one key-value head of its first models, fused with all queries in a matrix, nor the
mask with ALiBi's biases.
"""

from mgpu_pipe.architectures.family import Family, Stages

FAMILY = Family(
    packing="mask",
    unpacked_with="alibi",
    stages=Stages("word_embeddings", "h", "ln_f", tuples=True),
    tensor_if=({"new_decoder_architecture": True, "alibi": False}, {"multi_query": False, "alibi": False}),
    modules={
        "FalconAttention": {"query_key_value": "grouped", "dense": "row"},
        "FalconMLP": {"dense_h_to_4h": "column", "dense_4h_to_h": "row"},
    },
)
