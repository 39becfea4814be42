"""GGUF files, which llama.cpp and Ollama read: the format, layouts of families, tokenizers."""
