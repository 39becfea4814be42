"""FlexOlmo."""

from mgpu_pipe.families.family import Family

FAMILY = Family(packing="positions", experts="num_experts", softmax_routers=True)
