"""Attention and layers: a plain form of each, and a fast form for GPUs."""
