"""mgpu_pipe: one Hydra configuration, one reproducible multi-GPU run."""

__version__ = "0.1.0"
