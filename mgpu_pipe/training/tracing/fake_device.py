"""Fakes of a device and of a world, on which one process runs the code of a rank.

Tensors of the device have shapes and no values. On ``cuda:0`` (:func:`.load_fake_cuda`) tensors of the host are
real and those of the device fake, and torch refuses operators of both. On the CPU a tensor is fake if it is made of
fake ones or is new, large and no whole numbers. A number that the host reads of a fake tensor is 0 unless it is known
otherwise. The world's collectives send nothing; its tensors attend as on a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import device_mesh

from mgpu_pipe.system.compat.fake_tensors_private import (
    COPY_INTO,
    COPY_TO,
    DEVICE_OF,
    INDEXING,
    IS_PINNED,
    PIN,
    READ_NUMBER,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    answer_for_cuda,
    fake_store,
    finished_work,
    lift_host_tensors_only,
    prepare_fakes,
    tree_map_only,
)
from mgpu_pipe.system.compat.torch_private import TorchDispatchMode, operator, schema_of, tree_leaves
from mgpu_pipe.training.step import MicroBatchStop

PRODUCT = Path(__file__).parents[2]
PRETENCE = (Path(__file__).parent, PRODUCT / "system" / "compat")
"""Folders of this project that no step begins in."""
LARGE = 16
"""Elements from which a new tensor of the CPU is fake; those of a world's ranks and of sums stay real."""


class FakeDevice(TorchDispatchMode):
    """Inside, tensors of a device are fake; see above. A subclass may note what happens there.

    Args:
        kind: ``cpu`` or ``cuda``.
        known: by function of this project (``folder/file: function``), the whole number that it reads of the device.
    """

    active: FakeDevice | None = None

    def __init__(self, kind: str, known: Mapping[str, int]) -> None:
        super().__init__()
        self._kind = kind
        self._known = known
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: list[torch.Tensor] = []

    def note_wait(self, how: str) -> None:
        """The host waits for the device."""

    def note_operator(self, func: Any) -> None:
        """An operator runs on the device."""

    def note_collective(self, func: Any, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> None:
        """A collective of these tensors of the device runs."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new fake tensor of any size."""
        with self._fake:
            return torch.empty(tuple(shape), dtype=dtype, device=self._kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):  # three of four operators
            return args[0].fake_device
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for tensor in tensors):
            return NotImplemented  # a DTensor's operator comes again, of its local tensors
        there = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func.namespace == "c10d":
            if there:
                self.note_collective(func, tensors, leaves)
            work = finished_work()
            return work if len(schema_of(func).returns) == 1 else (args[0], work)
        if self._kind == "cpu":
            return self._on_one_device(func, args, kwargs, there, tensors)
        device = kwargs.get("device")
        if not there and (device is None or torch.device(device).type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            raise NotImplementedError(f"{func} is not counted")
        self.note_operator(func)
        return self._on_device(func, args, kwargs)

    def _on_one_device(self, func: Any, args: Any, kwargs: Any, there: bool, tensors: Sequence[torch.Tensor]) -> Any:
        """An operator on the CPU, which is the host and the device."""
        if there and func is READ_NUMBER:
            return self._read(args[0], "").item()
        if there and func is COPY_INTO and not isinstance(args[0], FakeTensor):
            return args[0]
        on_meta = any(tensor.is_meta for tensor in tensors) and str(kwargs.get("device")) == "cpu"
        if there or on_meta or (not tensors and _is_large(func, args, kwargs)):
            return self._run(func, args, kwargs)
        return func(*args, **kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is IS_PINNED:
            return self._is_pinned(args[0])
        if func is PIN:
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        return func(*args, **kwargs)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        data = tensor.data_ptr()
        return any(data == pinned.data_ptr() for pinned in self._pinned)

    def _on_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is READ_NUMBER:
            return self._read(args[0], "a number read").item()
        if func is COPY_TO:
            to = torch.device(kwargs.get("device") or args[0].device)
            if to.type == "cpu":
                return self._read(args[0], "a copy to the host").to(kwargs.get("dtype") or args[0].dtype)
            self._note_copy(args[0], kwargs.get("non_blocking"))
        if func is COPY_INTO:
            if not isinstance(args[0], FakeTensor):
                return args[0].copy_(self._read(args[1], "a copy to the host"))
            self._note_copy(args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if func in INDEXING:
            for index in args[1]:
                if index is not None and not isinstance(index, FakeTensor):
                    self.note_wait("an index of the host")
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator on fake tensors; where its result's shape depends on values, they are zeros."""
        try:
            with self._fake:
                return func(*args, **kwargs)
        except DynamicOutputShapeException:
            self.note_wait(func.overloadpacket.__name__)
        args, kwargs = tree_map_only(FakeTensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: self.empty(t.shape, t.dtype), result)

    def _read(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        """The host's copy."""
        self.note_wait(how)
        value = 0 if tensor.is_floating_point() else self._known.get(function_of_project(), 0)
        return torch.full(tensor.shape, value, dtype=tensor.dtype)

    def _note_copy(self, source: torch.Tensor, non_blocking: Any) -> None:
        if isinstance(source, FakeTensor):
            return
        if not non_blocking:
            self.note_wait("a copy to the device")
        elif not self._is_pinned(source):
            self.note_wait("a copy of pageable memory")


def _is_large(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator without tensors makes a large one of other than whole numbers."""
    shape = args[0] if args and isinstance(args[0], list | tuple | torch.Size) else ()
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    on_cpu = kwargs.get("device") is None or torch.device(kwargs["device"]).type == "cpu"
    is_numbers = all(isinstance(size, int) for size in shape)
    return on_cpu and dtype.is_floating_point and is_numbers and bool(shape) and math.prod(shape) > LARGE


def function_of_project() -> str:
    """The innermost function on the stack that is this project's, else the innermost of a package."""
    elsewhere = ""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        watches = path.parent in PRETENCE or frame.f_code.co_name == "__torch_dispatch__"
        if path.is_relative_to(PRODUCT) and not watches:
            return f"{path.relative_to(PRODUCT).with_suffix('')}: {frame.f_code.co_name}"
        if not elsewhere and "site-packages" in path.parts and not {"_subclasses", "utils"} & set(path.parts):
            elsewhere = f"{path.stem}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return elsewhere


@contextmanager
def on_fake_device(device: FakeDevice) -> Iterator[None]:
    """See :class:`FakeDevice`."""
    lift_host_tensors_only(True)
    FakeDevice.active = device
    try:
        with device:
            yield
    finally:
        FakeDevice.active = None
        lift_host_tensors_only(False)


class _Stream:
    """A stream, or an event, on which everything is through at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None:
        _note_synchronize()

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


def _note_synchronize(*_: Any) -> None:
    if FakeDevice.active is not None:
        FakeDevice.active.note_wait("synchronize")


def stand_in() -> None:
    """Let ``torch.cuda`` answer as a fake GPU of 80 GiB."""
    answer_for_cuda(_Stream, _note_synchronize, 80 << 30)
    prepare_fakes()


@contextmanager
def process_group(ranks: int, rank: int) -> Iterator[dict[str, int]]:
    """A world that sends nothing; gives the sizes of the device's groups that this process is in, the world's aside."""
    sizes: dict[str, int] = {}
    new_group: Any = dist.new_group

    def new_fake_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        group = new_group(*args, backend="fake", **options)
        if isinstance(group, dist.ProcessGroup) and backend != "gloo":  # gloo's are the host's
            sizes[group.group_name] = group.size()
        return group

    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    with (
        mock.patch.object(dist, "new_group", new_fake_group),
        mock.patch.object(device_mesh, "new_group", new_fake_group),
    ):
        yield sizes
    dist.destroy_process_group()


@contextmanager
def without_others() -> Iterator[None]:
    """Receive zeros, where the fake group would leave memory unchanged, and whole numbers 1, as torch's stages send
    them between known shapes. No rank asks the others by the clock whether to stop."""
    receive: Any = dist.ProcessGroup.recv

    def receive_constants(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        with torch.no_grad():  # torch before 2.12 receives into leaves that need gradients
            for tensor in tensors:
                tensor.fill_(0 if tensor.is_floating_point() else 1)
        return receive(group, tensors, *args)

    never = mock.patch.object(MicroBatchStop, "should_leave", return_value=False)
    with mock.patch.object(dist.ProcessGroup, "recv", receive_constants), never:
        yield


FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZES = range(8, 257, 8)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's function of this name: flash attention of half types without a mask, else memory-efficient attention.

    Args:
        query: (rows, heads, tokens, head size), as key and value, which may have fewer heads.
    """
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, 1) if groups > 1 else states for states in (key, value))
    if attn_mask is None and query.dtype in FLASH_DTYPES and query.shape[-1] in FLASH_HEAD_SIZES:
        flash = operator("_scaled_dot_product_flash_attention")
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    bias: Any = attn_mask
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = attn_mask.logical_not()
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        bias = bias.expand(*query.shape[:3], key.shape[2])
    efficient = operator("_scaled_dot_product_efficient_attention")
    out = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return out


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """A context in which torch's attention is :func:`scaled_dot_product_attention`."""
    with mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention):
        yield
