"""Phi-4 multimodal: embeds images and audio."""

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
