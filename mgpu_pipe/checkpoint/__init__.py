"""The canonical checkpoint format: tensor slices, manifest, save, load, retention."""
