"""SmolVLM."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"SmolVLMVisionAttention": OUT_PROJ, "SmolVLMVisionMLP": FC}, width_is_heads=True)
