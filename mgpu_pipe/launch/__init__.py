"""Starts, watches, stops and restarts the workers of a run. Imports no torch; the worker's entry aside."""
