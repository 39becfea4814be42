"""What is known of each model family, one file a ``model_type``; without torch."""
