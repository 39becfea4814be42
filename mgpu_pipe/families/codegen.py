"""CodeGen: queries, keys and values of four heads lie together in a fused projection."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages("wte", "h", "ln_f", after_embedding=("drop",), tuples=True), heads_together=4)
