"""Text as packed token samples: sources, tokenising, packing."""
