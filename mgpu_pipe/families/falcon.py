"""Falcon: counts the positions of ALiBi's biases by a mask of another shape than the block-diagonal one."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="mask", unpacked_with="alibi", stages=Stages("word_embeddings", "h", "ln_f", tuples=True))
