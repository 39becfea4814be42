"""The DeepSpeed engine: ZeRO-1, 2 and 3."""
