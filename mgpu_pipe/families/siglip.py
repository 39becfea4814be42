"""SigLIP."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"SiglipAttention": OUT_PROJ, "SiglipMLP": FC}, reads_inside=("SiglipTextEmbeddings",))
