"""The canonical checkpoint format: boxes, manifest, save, load, retention."""
