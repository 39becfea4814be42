"""The end of a process: what must still happen does, and nothing is torn down."""

from __future__ import annotations

import subprocess
import sys

from tests.support.command import REPOSITORY

PROGRAM = """
import atexit, os, threading, time
from mgpu_pipe.system.process_end import exit_now

class Bomb:
    def __del__(self):
        os.abort()  # as torch.distributed's threads do now and then when the interpreter destroys their groups

bomb = Bomb()
atexit.register(lambda: print("hook ran"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
print("no newline at the end", end="")
exit_now(75)
"""


def test_hooks_run_threads_end_and_nothing_is_destroyed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=60
    )
    assert done.returncode == 75, done.stderr
    assert done.stdout == "no newline at the endthread ended\nhook ran\n"
