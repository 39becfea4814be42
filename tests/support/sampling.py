"""Which of many like cases ``make test`` tries; the others have the marker ``exhaustive``, for ``make test-all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[tuple[Any, ...]], tried: Callable[..., bool]) -> list[Any]:
    """Parameters of a test; ``tried`` gets the values of a case."""
    return [pytest.param(*case, marks=[] if tried(*case) else pytest.mark.exhaustive) for case in cases]


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test that has many cases; ``make test`` tries the first of each ``number`` of them."""
    found = []
    for turn, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=pytest.mark.exhaustive if turn % number else []))
    return found
