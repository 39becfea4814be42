"""One set of formulas for a model's parameters, FLOPs, memory and traffic; no torch."""
