"""HY V4: several streams of hidden states, and parameters that mix them, outside of the blocks."""

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
