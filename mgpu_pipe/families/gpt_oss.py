"""GPT-OSS: its experts' gate and up projections take turns in one matrix, so that a range holds pairs of them."""

from mgpu_pipe.families.family import QKV, Family

FAMILY = Family(
    modules={
        "GptOssAttention": {**QKV, "o_proj": "row", "sinks": "column"},
        "GptOssMLP": {"experts": "experts"},
        "GptOssExperts": {
            "gate_up_proj": "column",
            "gate_up_proj_bias": "column",
            "down_proj": "row",
            "down_proj_bias": "once",
        },
    },
    experts="num_local_experts",
    softmax_routers=True,
)
