"""Measures where the time and memory of a step go."""
