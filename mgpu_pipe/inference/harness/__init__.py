"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval) on a run's model."""
