"""Numbers that may be arrays: functions that import NumPy for arrays alone, since ``check`` has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = float | NDArray[np.float64]
else:
    Numbers = float


def choose(condition: Any, then: Any, otherwise: Any) -> Numbers:
    """``then`` where a number or an array is true, else ``otherwise``."""
    if isinstance(condition, bool | int | float):
        return then if condition else otherwise
    import numpy as np

    chosen: NDArray[np.float64] = np.where(condition, then, otherwise)
    return chosen


def maximum(first: Any, second: Any) -> Numbers:
    """The larger of two numbers, element by element."""
    if isinstance(first, int | float) and isinstance(second, int | float):
        return max(first, second)
    import numpy as np

    largest: NDArray[np.float64] = np.maximum(first, second)
    return largest


def minimum(first: Any, second: Any) -> Numbers:
    """The smaller of two numbers, element by element."""
    return -maximum(-first, -second)
