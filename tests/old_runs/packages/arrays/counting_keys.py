"""What the program knows of the source without torch: its key."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.schema import DataConfig


@dataclass
class CountingConfig(DataConfig):
    longest_step: int = field(default=7, metadata={"at_least": 1})
    """The sequences count by 1 to this many."""
