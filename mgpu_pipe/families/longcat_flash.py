"""LongCat Flash: two attentions a layer, whose number has a name of its own."""

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
