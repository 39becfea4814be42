"""Sweeps: a store of points, workers, search and reports."""
