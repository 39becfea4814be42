"""Gemma 3n: embeddings for each layer beside the tokens' own."""

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
