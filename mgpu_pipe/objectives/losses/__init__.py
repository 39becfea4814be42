"""Losses over a vocabulary that never hold all logits of a step."""
