"""SigLIP."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"SiglipAttention": OUT_PROJ, "SiglipMLP": FC}, zero3_alone=False)
# Its pooling head is torch's MultiheadAttention, which uses the weights of its output layer without calling it.
