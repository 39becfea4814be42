"""GGUF files, which llama.cpp and Ollama read: the format, layouts of families, tokenizers."""

FILE = "model.gguf"
"""Name of the file in an exported folder."""
