"""One file a library for the private names that this program uses of it; tests/compat holds each to its contract."""
