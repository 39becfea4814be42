"""Which collectives a training step calls and how many bytes they send, over closed forms."""
