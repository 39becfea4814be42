"""Hugging Face models: from a configuration or a folder, on the meta device, with keyed initialisation."""
