"""GLM-MoE with sparse attention: blocks hand on which tokens they chose, beside hidden states."""

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
