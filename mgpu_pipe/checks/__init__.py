"""What can be known to be wrong with a run before a worker starts. Imports no torch."""
