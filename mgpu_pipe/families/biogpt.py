"""BioGPT."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="mask", stages=Stages(norm="layer_norm", added=("embed_positions",)))
