"""GPT-2."""

from mgpu_pipe.architectures.family import Family, SequencePlan, Sizes, Stages

FAMILY = Family(
    packing="positions",
    stages=Stages("wte", "h", "ln_f", added=("wpe",), after_embedding=("drop",)),
    modules={
        "GPT2Attention": {"c_attn": "packed", "q_attn": "column", "c_proj": "row"},
        "GPT2MLP": {"c_fc": "column", "c_proj": "row"},
    },
    sequence=SequencePlan("h", "ln_f", ("wpe",)),
    width_is_heads=True,
    sizes=Sizes(True, True, True, norm_bias=True, learned_positions=True, gated=False, inner="n_inner"),
)
