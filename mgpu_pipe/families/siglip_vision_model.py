"""A tower of SigLIP."""

from mgpu_pipe.families.siglip import FAMILY as FAMILY
