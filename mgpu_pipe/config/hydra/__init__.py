"""Composition and the command line, as Hydra reads them."""
