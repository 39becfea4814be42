"""Checks of a run before a worker starts, without importing torch."""
