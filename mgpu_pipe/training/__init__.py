"""Assembles the training run: Trainer, optimizers, schedules, precision, metrics, progress."""
