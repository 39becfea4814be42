"""T5: each stack's first block has the biases of relative positions, a column per head."""

from mgpu_pipe.architectures.family import Family, Style

ATTENTION: dict[str, Style] = {
    "q": "column",
    "k": "column",
    "v": "column",
    "relative_attention_bias": "column",
    "o": "row",
}

FAMILY = Family(
    stages=None,
    needs={"pad_token_id": "give the token that the decoder begins with"},
    modules={
        "T5Attention": ATTENTION,
        "T5DenseActDense": {"wi": "column", "wo": "row"},
        "T5DenseGatedActDense": {"wi_0": "column", "wi_1": "column", "wo": "row"},
    },
)
