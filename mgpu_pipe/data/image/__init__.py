"""Pictures: decoding, preparing, and data sets of pictures with a class."""
