"""One rank's training steps on fake tensors: its memory by phase and its collectives, without a GPU or other ranks."""
