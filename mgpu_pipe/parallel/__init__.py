"""One file an axis: pure functions of a model and a mesh, usable without Lightning."""
