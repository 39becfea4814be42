"""Optimizers, parameter groups, schedules, moving average and gradient norm."""
