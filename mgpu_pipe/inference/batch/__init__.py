"""Batch inference: a file of prompts becomes a file of answers."""
