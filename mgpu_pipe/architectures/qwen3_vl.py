"""Qwen 3 VL."""

from mgpu_pipe.architectures.family import LINEAR_FC, QKV, QKV_PROJ, Family

FAMILY = Family(
    modules={
        "Qwen3VLTextAttention": {**QKV, "o_proj": "row"},
        "Qwen3VLTextMLP": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
        "Qwen3VLVisionAttention": QKV_PROJ,
        "Qwen3VLVisionMLP": LINEAR_FC,
        "Qwen3VLVisionPatchMerger": LINEAR_FC,
    },
    projector=("merger", "deepstack_merger_list"),
    tower_outputs={"vision": ("pooler_output", "deepstack_features")},
)
