"""Gemma 4: embeddings for each layer beside the tokens' own."""

from __future__ import annotations

from mgpu_pipe.families.family import Family

FAMILY = Family(stages=None)
