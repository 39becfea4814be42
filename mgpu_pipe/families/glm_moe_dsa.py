"""GLM-MoE with sparse attention: blocks hand on which tokens they chose, beside hidden states."""

from __future__ import annotations

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
