"""Sound: decoding, synthesised digits, and data sets of recordings with what is said in them."""
