"""CLIP."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"CLIPAttention": OUT_PROJ, "CLIPMLP": FC}, reads_inside=("CLIPTextEmbeddings",))
