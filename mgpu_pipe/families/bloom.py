"""BLOOM."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(
    stages=Stages("word_embeddings", "h", "ln_f", after_embedding=("word_embeddings_layernorm",), tuples=True)
)
