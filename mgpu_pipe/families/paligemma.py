"""PaliGemma."""

from mgpu_pipe.families.family import Family
from mgpu_pipe.families.siglip import FAMILY as TOWER

FAMILY = Family(modules=TOWER.modules)
