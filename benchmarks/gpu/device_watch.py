"""Counts what code does on a fake ``cuda:0`` (:mod:`mgpu_pipe.training.tracing.fake_device`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mgpu_pipe.training.tracing.fake_device import FakeDevice, function_of_project, on_fake_device
from mgpu_pipe.training.tracing.phase_memory import Collectives


class Events(Collectives):
    """What happened on the device while ``counts``.

    Attributes:
        operators: without views.
        waits: of the host for the device: how, and in which function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.waits: Counter[str] = Counter()

    def wait(self, how: str) -> None:
        if self.counts:
            self.waits[f"{how}, {function_of_project()}"] += 1


class Watch(FakeDevice):
    """Notes events of the device."""

    def __init__(self, events: Events, known: Mapping[str, int]) -> None:
        super().__init__("cuda", known)
        self.events = events

    def note_wait(self, how: str) -> None:
        self.events.wait(how)

    def note_operator(self, func: Any) -> None:
        self.events.operators += self.events.counts and func.namespace != "prim" and not func.is_view

    def note_collective(self, func: Any, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> None:
        if self.events.record(func, tensors, leaves) == "barrier":
            self.events.wait("a barrier")


@contextmanager
def watching(events: Events, known: Mapping[str, int]) -> Iterator[None]:
    """Count the events of the code inside."""
    with on_fake_device(Watch(events, known)):
        yield
