"""Facts of each model family, and formulas of parameters, FLOPs, memory and traffic."""
