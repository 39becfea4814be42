"""Idefics 3."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"Idefics3VisionAttention": OUT_PROJ, "Idefics3VisionMLP": FC}, width_is_heads=True)
