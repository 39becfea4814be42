"""How good predictions, searches and trained models are."""
