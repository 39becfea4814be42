"""Qwen 3 VL."""

from mgpu_pipe.architectures.family import QKV, Family, Style

FC: dict[str, Style] = {"linear_fc1": "column", "linear_fc2": "row"}
FAMILY = Family(
    modules={
        "Qwen3VLTextAttention": {**QKV, "o_proj": "row"},
        "Qwen3VLTextMLP": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
        "Qwen3VLVisionAttention": {"qkv": "qkv", "proj": "row"},
        "Qwen3VLVisionMLP": FC,
        "Qwen3VLVisionPatchMerger": FC,
    },
    projector=("merger", "deepstack_merger_list"),
    tower_outputs={"vision": ("pooler_output", "deepstack_features")},
)
