"""ViT."""

from mgpu_pipe.families.family import FC, QKV, Family

FAMILY = Family(modules={"ViTAttention": {**QKV, "o_proj": "row"}, "ViTMLP": FC})
