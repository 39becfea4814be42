"""GPT-OSS: its experts interleave gate and up projections in one matrix, so a range holds pairs."""

from mgpu_pipe.architectures.family import QKV, Family, Sizes

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
    sizes=Sizes("attention_bias", "attention_bias", sinks=True, expert_bias=True, expert_width="intermediate_size"),
)
