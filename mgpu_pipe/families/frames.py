"""How many frames a speech model makes of a recording: what its convolutions leave. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Frames:
    """The convolutions that a waveform goes through: the width and the stride of each."""

    kernels: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Frames:
        return cls(tuple(fields["conv_kernel"]), tuple(fields["conv_stride"]))

    def of_samples(self, samples: Any, layers: int | None = None) -> Any:
        """Frames behind the first ``layers`` convolutions, all by default; of a number or an array of numbers."""
        for kernel, stride in zip(self.kernels[:layers], self.strides[:layers], strict=True):
            samples = (samples - kernel) // stride + 1
        return samples

    def fault(self, numbers: Sequence[int], samples: int) -> str | None:
        """Why CTC cannot learn a transcript of these characters from a recording of so many samples: it puts a blank
        between equal ones (Graves et al. 2006)."""
        needed = len(numbers) + sum(one == other for one, other in pairwise(numbers))
        there = self.of_samples(samples)
        return None if needed <= there else f"has a text that needs {needed} frames; the recording has {there}"

    def samples_of(self, frames: int) -> int:
        """The fewest samples that make so many frames."""
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames
