"""Which of many like cases ``make test`` tries; the others have the marker ``exhaustive``, for ``make test-all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[tuple[Any, ...]], tried: Callable[..., bool]) -> list[Any]:
    """Parameters of a test; ``tried`` gets the values of a case."""
    return [pytest.param(*case, marks=[] if tried(*case) else pytest.mark.exhaustive) for case in cases]
