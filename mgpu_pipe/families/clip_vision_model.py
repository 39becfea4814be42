"""A tower of CLIP."""

from mgpu_pipe.families.clip import FAMILY as FAMILY
