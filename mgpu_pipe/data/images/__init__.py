"""Pictures and videos: decoding, preparation, and their data sets."""
