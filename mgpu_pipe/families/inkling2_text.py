"""Inkling 2: a norm inside of its embedding, so that tensor parallelism does not cut it right."""

from mgpu_pipe.families.family import Family

FAMILY = Family(tensor=False)
