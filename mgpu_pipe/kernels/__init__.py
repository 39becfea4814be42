"""Attention and the loss over a vocabulary: a plain form of each, and a fast one for GPUs."""
