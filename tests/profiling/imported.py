"""Imports nothing, so that what a process has imported can be looked at from it."""

import sys


def modules() -> list[str]:
    return list(sys.modules)
