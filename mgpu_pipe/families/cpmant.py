"""CPM-Ant: every token sees all others, whatever the configuration says."""

from mgpu_pipe.families.family import Family

FAMILY = Family(causal=False)
