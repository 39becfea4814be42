"""Memory, step time and cost of a run, predicted before it starts; without torch."""
