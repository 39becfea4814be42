"""Runs code on a pretended ``cuda:0`` (:mod:`benchmarks.pretend_cuda`) and counts what it does there.

Tensors of the host are real. Operators on the device go through torch's fake tensors, which refuse tensors of two
devices. A number that the host reads of the device is 0 unless it is told otherwise; collectives are counted and not
sent.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.collectives import _group_size
from mgpu_pipe.architectures.formulas.traffic import all_reduced, exchanged

PRODUCT = Path(__file__).parents[1] / "mgpu_pipe"
ATEN = torch.ops.aten
INDEXING = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default)


class Events:
    """What happened on the device while :attr:`counts`."""

    def __init__(self) -> None:
        self.counts = False
        self.operators = 0
        """Without views."""
        self.waits: Counter[str] = Counter()
        """Of the host for the device: how, and in which function."""
        self.calls: Counter[str] = Counter()
        """Collectives by name; a message counts where it is sent."""
        self.sent: Counter[str] = Counter()
        """Bytes of theirs that this process sends by the ring algorithms."""

    def wait(self, how: str) -> None:
        if self.counts:
            self.waits[f"{how}, {_place()}"] += 1

    def collective(self, func: Any, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> str:
        """Count an operator of ``c10d``, of these tensors and arguments; its name."""
        name = str(func._schema.name).removeprefix("c10d::").strip("_")
        if self.counts and name != "recv":
            if "coalesced" in name:
                raise NotImplementedError(f"{func} is not counted")
            size = _group_size([leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)])
            largest = max(tensor.nbytes for tensor in tensors)
            share = all_reduced(largest, size) if name == "allreduce" else exchanged(largest, size)
            self.calls[name] += 1
            self.sent[name] += largest if name == "send" else round(share)
        return name


def _place() -> str:
    """The innermost function on the stack that is this project's, else the innermost one of a package."""
    elsewhere = ""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PRODUCT):
            return f"{path.relative_to(PRODUCT).with_suffix('')}: {frame.f_code.co_name}"
        if not elsewhere and "site-packages" in path.parts and not {"_subclasses", "utils"} & set(path.parts):
            elsewhere = f"{path.stem}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return elsewhere


class Watch(TorchDispatchMode):
    """Inside, ``cuda:0`` can be used.

    Args:
        told: by function of this project (``folder/file: function``), the whole number that it reads of the device.
    """

    active: Watch | None = None

    def __init__(self, events: Events, told: Mapping[str, int]) -> None:
        super().__init__()
        self.events = events
        self._told = told
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for tensor in tensors):
            return NotImplemented  # a DTensor's operator comes again, of its local tensors
        there = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func.namespace == "c10d":
            return self._collective(func, args, tensors if there else [], leaves)
        device = kwargs.get("device")
        if not there and (device is None or torch.device(device).type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            raise NotImplementedError(f"{func} is not counted")
        self.events.operators += self.events.counts and func.namespace != "prim" and not func.is_view
        return self._on_device(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is ATEN.is_pinned.default:
            return self._is_pinned(args[0])
        if func is ATEN._pin_memory.default:
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        return func(*args, **kwargs)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(storage == pinned.untyped_storage()._cdata for pinned in self._pinned)

    def _on_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is ATEN._local_scalar_dense.default:
            return self._read(args[0], "a number read").item()
        if func is ATEN._to_copy.default:
            to = torch.device(kwargs.get("device") or args[0].device)
            if to.type == "cpu":
                return self._read(args[0], "a copy to the host").to(kwargs.get("dtype") or args[0].dtype)
            self._note_copy(args[0], kwargs.get("non_blocking"))
        if func is ATEN.copy_.default:
            if not isinstance(args[0], FakeTensor):
                return args[0].copy_(self._read(args[1], "a copy to the host"))
            self._note_copy(args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if func in INDEXING:
            for index in args[1]:
                if index is not None and not isinstance(index, FakeTensor):
                    self.events.wait("an index of the host")
        try:
            with self._fake:
                return func(*args, **kwargs)
        except DynamicOutputShapeException:
            self.events.wait(func.overloadpacket.__name__)
        args, kwargs = tree_map_only(FakeTensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs))
        found = func(*args, **kwargs)
        with self._fake:
            return tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"), found)

    def _read(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        """The host's copy."""
        self.events.wait(how)
        value = 0 if tensor.is_floating_point() else self._told.get(_place(), 0)
        return torch.full(tensor.shape, value, dtype=tensor.dtype)

    def _note_copy(self, source: torch.Tensor, non_blocking: Any) -> None:
        if isinstance(source, FakeTensor):
            return
        if not non_blocking:
            self.events.wait("a copy to the device")
        elif not self._is_pinned(source):
            self.events.wait("a copy of pageable memory")

    def _collective(self, func: Any, args: Any, there: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Any:
        if there and self.events.collective(func, there, leaves) == "barrier":
            self.events.wait("a barrier")
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


@contextmanager
def watching(events: Events, told: Mapping[str, int]) -> Iterator[None]:
    """See :class:`Watch`."""
    # torch.tensor(..., device="cuda") makes a tensor of the host, and then a copy that is seen. A thread's own flag.
    torch._C._set_only_lift_cpu_tensors(True)
    Watch.active = Watch(events, told)
    try:
        with Watch.active:
            yield
    finally:
        Watch.active = None
        torch._C._set_only_lift_cpu_tensors(False)


class _Stream:
    """A stream, or an event, on which everything is through at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None:
        _synchronized()

    def record(self, *_: Any) -> _Stream:
        return self

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None: ...

    wait_event = wait_stream = wait

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _synchronized(*_: Any) -> None:
    if Watch.active is not None:
        Watch.active.events.wait("synchronize")


def _take_data(old: torch.Tensor, new: torch.Tensor) -> None:
    """Fake tensors, which others refer to weakly, cannot be swapped when a module is cast."""
    old.data = new.data


def stand_in() -> None:
    """Let ``torch.cuda`` answer what a step asks of it."""
    only = _Stream()
    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("_lazy_init", "set_device", "empty_cache", "set_rng_state", "reset_peak_memory_stats")),
        **dict.fromkeys(("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("current_stream", "default_stream", "stream"), only),
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(total_memory=80 << 30, major=9, minor=0),
        "get_device_name": "pretended",
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[misc, assignment]
    torch.cuda.synchronize = _synchronized
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    torch.utils.swap_tensors = _take_data  # type: ignore[assignment]
    FakeTensorMode.avoid_device_init = True  # type: ignore[method-assign, assignment]
    FakeTensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]
    FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()  # type: ignore[method-assign]
