"""HRM: blocks run in loops over two states."""

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
