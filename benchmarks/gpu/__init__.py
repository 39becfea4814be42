"""What one GPU, or a fake one on the CPU, says of a training step."""
