"""Runs under random disturbances: every run finishes with the same metrics."""
