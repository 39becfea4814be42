"""The LightningModules: what is minimised, and how one micro-batch gives its sum of losses."""
