"""Private names of Python's standard library (3.10 to 3.13)."""

from __future__ import annotations

import atexit
import threading

PRIVATE = ("threading:_shutdown", "atexit:_run_exitfuncs")


def run_exit_hooks() -> None:
    """Join all threads and run the ``atexit`` functions, like the interpreter at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
