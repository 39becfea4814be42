"""Audio: decoding, synthesised digits, and data sets of recordings with transcripts."""
