"""Two towers of any kinds, one for pictures and one for texts."""

from mgpu_pipe.families import bert, siglip, vit
from mgpu_pipe.families.family import Family

FAMILY = Family(modules={**vit.FAMILY.modules, **siglip.FAMILY.modules, **bert.FAMILY.modules})
