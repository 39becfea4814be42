"""LLaVA."""

from mgpu_pipe.families.family import Family

FAMILY = Family(modules={"LlavaMultiModalProjector": {"linear_1": "column", "linear_2": "row"}})
