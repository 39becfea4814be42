"""The parity certificate: the configured strategy against the plain computation of one process."""
