"""Submits runs and sweeps to SLURM."""
