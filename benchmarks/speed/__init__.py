"""How long a training step, its data and its checkpoints take, over a named peer."""
