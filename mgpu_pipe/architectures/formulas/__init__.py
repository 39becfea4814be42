"""Formulas for a model's parameters, FLOPs, memory, traffic and stages."""
