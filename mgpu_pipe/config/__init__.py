"""Schema, composition, validation and freezing of a run's configuration."""
