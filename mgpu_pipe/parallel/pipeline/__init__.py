"""Pipeline parallelism: ranks hold consecutive blocks of a model."""
