"""Initial weights keyed by (seed, parameter name)."""
