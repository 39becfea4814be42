"""gpt_bigcode."""

from __future__ import annotations

from mgpu_pipe.families.family import Family, Stages

FAMILY = Family(stages=Stages("wte", "h", "ln_f", added=("wpe",), after_embedding=("drop",)))
