"""Keys of ``mgpu-pipe plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class PlanConfig:
    hardware: list[str] = field(default_factory=list)
    """Hardware to plan for: names of profiles (a100_40, a100_80, b200, cpu, h100, h200, rtx4090, rtx5090), or paths of
    profiles of yours; empty: this machine's."""
    network: str | None = None
    """Network between nodes, a name of planning/profiles/networks.yaml; null is the profile's."""
    gpus: list[int] = field(default_factory=list)
    """Numbers of GPUs, or CPU processes, to plan for; empty: trainer.num_nodes times trainer.devices."""
    price: float | None = field(default=None, metadata={"above": 0, "or": ", or null"})
    """Dollars a GPU and hour; null is the profile's dollars_per_hour, or unknown."""
    tokens: float | None = field(default=None, metadata={"above": 0, "or": ", or null"})
    """Tokens of the whole training, for its time and cost; null is trainer.max_steps steps."""
    rank_by: Literal["speed", "cost", "memory"] = "speed"
    """Order of the plans: tokens a second, dollars a token, or least memory."""
    predicted_seconds: float | None = None
    """Seconds a step that strategy=auto predicted; it sets this, and the report compares."""
    predicted_gib: float | None = None
    """GiB of tensors of a process that strategy=auto predicted."""
    rows: int = field(default=8, metadata={"at_least": 1, "at_most": 100})
    """Plans that are shown, shared evenly by all hardware and numbers of GPUs, at least one of each."""
    failure_hours: float | None = field(default=None, metadata={"above": 0, "or": ", or null"})
    """Mean hours between failures of a GPU, for the share of useful time that check prints and for
    checkpoint.every_n_steps=auto; null is unknown."""
    save_stall_s: float = field(default=10.0, metadata={"at_least": 0})
    """Seconds that a save stops training for, with plan.failure_hours."""
    restart_s: float = field(default=600.0, metadata={"at_least": 0})
    """Seconds from a failure until training goes on, with plan.failure_hours."""
