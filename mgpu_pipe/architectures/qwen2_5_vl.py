"""Qwen 2.5 VL."""

from mgpu_pipe.architectures.family import Family

FAMILY = Family(
    modules={
        "Qwen2_5_VLVisionAttention": {"qkv": "qkv", "proj": "row"},
        "Qwen2_5_VLMLP": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
    },
    width_is_heads=True,
    projector=("merger",),
    tower_outputs={"vision": ("pooler_output",)},
)
