"""GPT-NeoX Japanese."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages("embed_in", norm="final_layer_norm", tuples=True))
