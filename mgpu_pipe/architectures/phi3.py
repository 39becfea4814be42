"""Phi-3."""

from mgpu_pipe.architectures.family import Family, Sizes

FAMILY = Family(
    packing="positions",
    modules={
        "Phi3Attention": {"qkv_proj": "qkv", "o_proj": "row"},
        "Phi3MLP": {"gate_up_proj": "packed", "down_proj": "row"},
    },
    sizes=Sizes(),
)
