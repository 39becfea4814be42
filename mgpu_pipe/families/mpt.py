"""MPT."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="mask", stages=Stages("wte", "blocks", "norm_f", tuples=True))
