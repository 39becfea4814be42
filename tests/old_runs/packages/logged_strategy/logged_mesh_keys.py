"""What the program knows of the strategy without torch: its key."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.strategy import StrategyConfig


@dataclass
class LoggedMeshConfig(StrategyConfig):
    log_digits: int = field(default=6, metadata={"at_least": 1, "at_most": 17})
    """Digits behind the point of the norm in the log."""
