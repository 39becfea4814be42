"""Qwen 3 MoE."""

from mgpu_pipe.architectures.family import Family, SequencePlan, Sizes

FAMILY = Family(
    packing="positions",
    sequence=SequencePlan(),
    experts="num_experts",
    softmax_routers=True,
    sizes=Sizes("attention_bias", "attention_bias", head_norms=True, expert_width="moe_intermediate_size"),
)
