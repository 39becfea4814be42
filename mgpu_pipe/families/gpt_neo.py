"""GPT-Neo: does not look its attention function up by name."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(
    packing="positions",
    own_attention=True,
    stages=Stages("wte", "h", "ln_f", added=("wpe",), after_embedding=("drop",), tuples=True),
)
