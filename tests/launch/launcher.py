"""A launcher process for tests: supervises stand-ins and prints how they ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.supervisor import supervise
from mgpu_pipe.launch.workers import WorkerPlan
from mgpu_pipe.launch.world import World

STAND_IN = Path(__file__).with_name("stand_in.py")


def main() -> int:
    folder, behaviour, world_size, options = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    plan = WorkerPlan(
        argv=[sys.executable, str(STAND_IN), str(folder), behaviour],
        world=World.on_this_machine(world_size),
        paths=RunPaths(folder),
        live_fd=os.dup(2),
    )
    with SignalInbox() as inbox:
        outcome = supervise(plan, inbox, **{"stop_timeout": 30.0, **options})
    if outcome.failure is not None:
        print(outcome.failure.show())
    print(json.dumps([outcome.status, outcome.attempt, outcome.message]))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
