"""Records the tensor operations that build a model on the meta device, as a program to replay.

Storages identify tensors, so views need no bookkeeping: an operation reads and writes strided windows of storages. A
replay of the operations that one storage depends on, in real memory, gives that tensor and nothing else of the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mgpu_pipe.system.compat.torch_private import TorchDispatchMode, schema_of, storage_key, tree_map


class NotRecordedError(Exception):
    """A tensor depends on values that were never recorded."""


@dataclass(frozen=True)
class TensorRef:
    """A strided window (in elements) of a recorded storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def is_flat(self) -> bool:
        """Whether the window is one contiguous run of its storage."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass
class Operation:
    """Recorded call. ``reads`` and ``writes`` are storages; ``overwrites`` those whose old content is lost."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[TensorRef]
    reads: set[int]
    writes: set[int]
    overwrites: set[int]
    random: bool


PURE_OVERWRITES = {
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.exponential_.default,
    torch.ops.aten.log_normal_.default,
    torch.ops.aten.cauchy_.default,
    torch.ops.aten.geometric_.default,
    torch.ops.aten.random_.default,
    torch.ops.aten.random_.to,
    getattr(torch.ops.aten.random_, "from"),
}
"""In-place operations whose result does not depend on the old content."""


UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
"""Operations that create a tensor without values."""


SHAPE_ONLY = re.compile(r"aten::(new_\w+|\w+_like)$")
"""Operations that take shape and type from their argument, not values."""


class Recorder(TorchDispatchMode):
    """Records every operation in its context, in order, with storages."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.written_by: dict[int, list[int]] = defaultdict(list)
        self.constants: dict[int, torch.UntypedStorage] = {}
        self.storage_bytes: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """Window of ``tensor``. Keeps storages alive, so that no address is reused."""
        storage = tensor.untyped_storage()
        key = self._ids.get(storage_key(storage))
        if key is None:
            key = self._ids[storage_key(storage)] = len(self._alive)
            self._alive.append(storage)
        self.storage_bytes[key] = storage.nbytes()
        return TensorRef(key, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known_before = len(self._alive)
        reads: set[int] = set()
        recorded_args, recorded_kwargs = self._freeze((args, kwargs), reads)
        # A meta tensor has no values to write: most of a model's initialisation is such operations.
        is_void = func in PURE_OVERWRITES and args[0].is_meta
        result = args[0] if is_void else func(*args, **kwargs)
        written: list[TensorRef] = []
        for position, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = (
                    recorded_kwargs.get(argument.name)
                    if argument.kwarg_only
                    else (
                        recorded_args[position] if position < len(recorded_args) else recorded_kwargs.get(argument.name)
                    )
                )
                written.extend(_refs(value))
        outputs = [self.ref(tensor) for tensor in _tensors(result)]
        created = {ref.storage for ref in outputs if ref.storage >= known_before and ref.storage not in reads}
        if not written and not created:
            return result
        overwrites = set(created)
        if func in PURE_OVERWRITES or any(name.endswith("out") for name in recorded_kwargs):
            overwrites |= {ref.storage for ref in written if self._covers(ref)}
        if SHAPE_ONLY.match(schema_of(func).name):
            reads = set()
        self._append(
            Operation(
                func,
                recorded_args,
                recorded_kwargs,
                outputs,
                reads,
                created | {ref.storage for ref in written},
                overwrites,
                torch.Tag.nondeterministic_seeded in func.tags,
            )
        )
        return result

    def record_overwrite(self, function: Callable[..., Any], tensor: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Records ``function(tensor, **kwargs)``, which overwrites all of ``tensor``."""
        ref = self.ref(tensor)
        overwrites = {ref.storage} if self._covers(ref) else set()
        self._append(Operation(function, (ref,), dict(kwargs), [], set(), {ref.storage}, overwrites, True))

    def cone(self, storage: int) -> list[Operation]:
        """Operations that ``storage`` depends on, in order; NotRecordedError if a value was not recorded."""
        chosen: set[int] = set()
        pending = [(storage, len(self.operations))]
        seen: set[tuple[int, int]] = set()
        while pending:
            current, before = pending.pop()
            if (current, before) in seen:
                continue
            seen.add((current, before))
            defined, written = current in self.constants, False
            for index in reversed(self.written_by.get(current, [])):
                if index >= before:
                    continue
                operation = self.operations[index]
                if index not in chosen:
                    chosen.add(index)
                    pending.extend((read, index) for read in operation.reads if read != current)
                if current in operation.overwrites:
                    defined = written or operation.function not in UNINITIALISED
                    break
                written = True
            if not defined:
                raise NotRecordedError
        return [self.operations[index] for index in sorted(chosen)]

    def _append(self, operation: Operation) -> None:
        for storage in operation.writes:
            self.written_by[storage].append(len(self.operations))
        self.operations.append(operation)

    def _covers(self, ref: TensorRef) -> bool:
        return ref.is_flat() and ref.numel * ref.dtype.itemsize == self.storage_bytes[ref.storage]

    def _freeze(self, tree: Any, reads: set[int]) -> Any:
        def freeze(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                ref = self.ref(value)
                reads.add(ref.storage)
                if value.device.type != "meta" and not self.written_by.get(ref.storage):
                    self.constants.setdefault(ref.storage, value.untyped_storage().clone())
                return ref
            return torch.device("cpu") if isinstance(value, torch.device) else value

        return tree_map(freeze, tree)


class RealLiterals(TorchFunctionMode):
    """Builds a meta ``torch.tensor(...)`` on the CPU and copies it, so that a recorder sees the values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            device = kwargs.get("device")
            wanted = torch.get_default_device() if device is None else torch.device(device)
            if wanted.type == "meta":
                return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        return func(*args, **kwargs)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _refs(tree: Any) -> Iterator[TensorRef]:
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _refs(value)


def replay(
    operations: list[Operation],
    result: TensorRef,
    constants: dict[int, torch.UntypedStorage],
    storage_bytes: dict[int, int],
    seed: int,
) -> torch.Tensor:
    """Runs ``operations`` on CPU memory and returns ``result``; random operations draw from ``seed``."""
    storages: dict[int, torch.UntypedStorage] = {}

    def window(ref: TensorRef) -> torch.Tensor:
        if ref.storage not in storages:
            known = constants.get(ref.storage)
            storages[ref.storage] = (
                known.clone() if known is not None else torch.UntypedStorage(storage_bytes[ref.storage])
            )
        return torch.empty(0, dtype=ref.dtype).set_(storages[ref.storage], ref.offset, ref.shape, ref.stride)

    def thaw(value: Any) -> Any:
        return window(value) if isinstance(value, TensorRef) else value

    with torch.no_grad(), torch.device("cpu"), _seed(seed):
        for operation in operations:
            is_ref = {"is_leaf": lambda value: isinstance(value, TensorRef)}
            args, kwargs = tree_map(thaw, (operation.args, operation.kwargs), **is_ref)
            produced = operation.function(*args, **kwargs)
            for ref, tensor in zip(operation.outputs, _tensors(produced), strict=False):
                storages.setdefault(ref.storage, tensor.untyped_storage())
        return window(result).clone()


@contextmanager
def _seed(seed: int) -> Iterator[None]:
    """Context that seeds the process's CPU generator and restores it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
