"""Servers that answer with a trained model: the embedded one, and the commands of other engines."""
