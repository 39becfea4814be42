"""CLIPSeg, its two towers."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"CLIPSegAttention": OUT_PROJ, "CLIPSegMLP": FC}, reads_inside=("CLIPSegTextEmbeddings",))
