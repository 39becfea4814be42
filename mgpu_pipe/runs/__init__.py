"""Runs on the disk: which there are, and which is the newest."""
