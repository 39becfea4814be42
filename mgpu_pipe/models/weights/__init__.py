"""Weights in Hugging Face folders: reading whole or in slices, and writing."""
