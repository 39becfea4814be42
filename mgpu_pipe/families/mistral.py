"""Mistral, which is like Llama."""

from mgpu_pipe.families.llama import FAMILY as FAMILY
