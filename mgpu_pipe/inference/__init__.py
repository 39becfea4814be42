"""What a finished run is used for: evaluate, generate, export."""
