"""Sweeps: a store of their points, the work on it, search, and what is read of it. No torch."""
