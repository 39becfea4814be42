"""GPT-J."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages("wte", "h", "ln_f", after_embedding=("drop",), tuples=True))
