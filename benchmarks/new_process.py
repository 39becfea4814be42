"""Calls a function in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Result = TypeVar("Result")


def call_in_new_process(function: Callable[..., Result], *arguments: object, method: str = "fork") -> Result:
    """Result of ``function``; a pool of multiprocessing would wait forever for a process that died.

    Raises:
        BrokenProcessPool: the process died, or its error cannot be pickled.
    """
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        return pool.submit(function, *arguments).result()
