"""Doge: masks have weights for each head, so that tensor parallelism does not cut it right; routers reshape their
logits across the tokens of a micro-batch.
"""

from mgpu_pipe.families.family import Family

FAMILY = Family(tensor=False, mixes_tokens="is_moe")
