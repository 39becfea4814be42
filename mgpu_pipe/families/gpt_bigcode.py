"""GPT BigCode."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="positions", stages=Stages("wte", "h", "ln_f", added=("wpe",), after_embedding=("drop",)))
