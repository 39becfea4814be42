"""NanoChat: its norm has no parameters and is used before the blocks and after them."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(packing="positions", stages=Stages(norm=None))
