"""BitNet."""

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages())
