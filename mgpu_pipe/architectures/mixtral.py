"""Mixtral."""

from mgpu_pipe.architectures.family import Family, SequencePlan, Sizes

FAMILY = Family(
    packing="positions",
    sequence=SequencePlan(),
    experts="num_local_experts",
    softmax_routers=True,
    width_is_heads=True,
    sizes=Sizes(expert_width="intermediate_size"),
)
