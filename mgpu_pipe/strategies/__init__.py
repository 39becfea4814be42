"""The Lightning Strategy plugins; thin: they call ``parallel/`` and ``checkpoint/``."""
