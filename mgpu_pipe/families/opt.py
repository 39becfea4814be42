"""OPT."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family, Stages

FAMILY = Family(
    packing="mask",
    stages=Stages(norm="final_layer_norm", added=("embed_positions",), path="decoder"),
    modules={"OPTAttention": OUT_PROJ, "OPTDecoderLayer": FC},
)
