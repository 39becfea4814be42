"""Scripts that print a table and write JSON; every figure is a ratio in one run against a named peer."""
