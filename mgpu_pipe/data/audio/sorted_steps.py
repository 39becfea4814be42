"""An order whose steps hold samples of about one length, so that little of a step is padding. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.order import GlobalOrder


class SortedSteps:
    """The samples of ``order``, those of some steps sorted by length together; these steps come in a drawn order.

    It is a pure function of the seed and the place, as ``order`` is; each epoch of ``order`` still has every sample.

    Args:
        lengths: of the data set's samples.
        step_samples: that an optimizer step takes.
        steps: that are sorted together.
    """

    def __init__(self, order: GlobalOrder, lengths: NDArray[np.int64], step_samples: int, steps: int) -> None:
        self._order, self._lengths, self._step_samples, self._steps = order, lengths, step_samples, steps
        self._places = GlobalOrder(order.seed, steps)

    def indices(self, first: int, count: int) -> NDArray[np.int64]:
        size = self._step_samples * self._steps
        begin, end = first // size, -(-(first + count) // size)
        found = np.concatenate([self._sorted(block, size) for block in range(begin, end)])
        return found[first - begin * size :][:count]

    def _sorted(self, block: int, size: int) -> NDArray[np.int64]:
        drawn = self._order.indices(block * size, size)
        ranked = drawn[np.argsort(self._lengths[drawn], kind="stable")].reshape(self._steps, self._step_samples)
        return ranked[self._places.indices(block * self._steps, self._steps)].reshape(-1)
