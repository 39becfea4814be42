"""Uses of a finished run: evaluate, generate, export."""
