"""Sources, tokenising, packing, the global order, and the step batch."""
