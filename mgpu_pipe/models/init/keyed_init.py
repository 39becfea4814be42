"""Initialisation keyed by (seed, parameter name): the same bits under every strategy.

The model's initialisation is recorded once on the meta device (:mod:`mgpu_pipe.models.init.op_trace`), then replayed a
parameter at a time. Random numbers come from CPU generators seeded by SHA-256 of (seed, parameter name, operation,
chunk). So a parameter's values do not depend on the device, other parameters or the order. A parameter with an
element-wise recording (every common one) is drawn in chunks, so a rank draws little more than its range of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.init.op_trace import NotRecordedError, Operation, RealLiterals, Recorder, TensorRef, replay

CHUNK = 1 << 21
"""Elements drawn from one generator. A constant of the format: another value gives other weights."""

aten = torch.ops.aten
ELEMENTWISE_DRAWS: set[Any] = {aten.normal_.default, aten.uniform_.default, nn.init.trunc_normal_}
ELEMENTWISE_FILLS: set[Any] = {aten.fill_.Scalar, aten.zero_.default}
ELEMENTWISE: set[Any] = (
    ELEMENTWISE_DRAWS
    | ELEMENTWISE_FILLS
    | {
        aten.mul_.Scalar,
        aten.mul_.Tensor,
        aten.add_.Scalar,
        aten.add_.Tensor,
        aten.sub_.Tensor,
        aten.div_.Tensor,
        aten.div_.Scalar,
        aten.clamp_.default,
        aten.erfinv_.default,
        aten.neg_.default,
        aten.exp_.default,
        aten.log_.default,
    }
)
EARLY_OUT_ON_META = ("trunc_normal_", "orthogonal_", "sparse_", "dirac_")
"""torch.nn.init functions that do nothing on meta tensors, or depend on values."""


def key_of(seed: int, *parts: object) -> int:
    """64-bit seed from SHA-256 of the run's seed and the parts that name a draw."""
    text = "\0".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass
class InitRecipe:
    """Recorded initialisation of every parameter, buffer and loose tensor of a model."""

    recorder: Recorder
    refs: dict[str, TensorRef]
    """Parameters, buffers and tensors in plain attributes of modules, by name."""
    model_type: str

    @classmethod
    def record(cls, build: Callable[[], nn.Module], model_type: str) -> InitRecipe:
        """Records ``build()``, which must return an untied model, and its ``initialize_weights()``, on meta."""
        recorder = Recorder()
        with _recorded_init_functions(recorder), torch.device("meta"), RealLiterals(), recorder:
            model = build()
        with _recorded_init_functions(recorder), RealLiterals(), recorder, torch.no_grad():
            model.initialize_weights()  # type: ignore[operator]
        refs = {name: recorder.ref(tensor) for name, tensor in named_tensors(model)}
        return cls(recorder, refs, model_type)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.refs[name].shape

    def draw(self, name: str, seed: int, device: torch.device | str = "cpu", key: str | None = None) -> torch.Tensor:
        """Whole tensor ``name`` as initialised under ``seed``.

        Args:
            key: name that keys the random numbers, if a tied parameter has another name.

        Raises:
            ConfigError: the model's initialisation of that tensor cannot be recorded.
        """
        shape = self.refs[name].shape
        if not shape:
            return self._draw_whole(name, seed, key or name).to(device)
        return self.draw_rows(name, seed, 0, shape[0], device, key)

    def draw_rows(
        self, name: str, seed: int, start: int, stop: int, device: torch.device | str = "cpu", key: str | None = None
    ) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (of the first dim) of the tensor ``name``, bit-equal to that slice of ``draw``."""
        ref = self.refs[name]
        if not ref.shape:  # stored as a vector of one element
            return self._draw_whole(name, seed, key or name).reshape(1)[start:stop].to(device)
        operations = self._operations(name)
        if not _is_elementwise(operations, ref):
            return self._draw_whole(name, seed, key or name)[start:stop].to(device)
        row = prod(ref.shape[1:])
        flat = _draw_range(operations, ref, seed, key or name, start * row, stop * row)
        return flat.view(stop - start, *ref.shape[1:]).to(device)

    def _draw_whole(self, name: str, seed: int, key: str) -> torch.Tensor:
        recorder = self.recorder
        operations = self._operations(name)
        return replay(
            operations, self.refs[name], recorder.constants, recorder.storage_bytes, key_of(seed, key, "whole")
        )

    def _operations(self, name: str) -> list[Operation]:
        try:
            return self.recorder.cone(self.refs[name].storage)
        except NotRecordedError:
            fix = "use another model type, or load weights with model.path"
            reason = f"transformers leaves {name} of this family without an initialisation that can be repeated by name"
            raise ConfigError("model.type", self.model_type, fix, reason) from None


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``model``'s modules under every name: parameters, buffers, plain attributes."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{name}" if prefix else name, value


def _is_elementwise(operations: list[Operation], ref: TensorRef) -> bool:
    """Whether all operations are element-wise: draws and scalar arithmetic on all, or constants on flat parts."""
    if ref.offset or not ref.is_flat():
        return False
    started = False
    for operation in operations:
        target = operation.args[0] if operation.args else None
        rest = [*operation.args[1:], *operation.kwargs.values()]
        if operation.function not in ELEMENTWISE or not isinstance(target, TensorRef) or target.storage != ref.storage:
            return False
        if not target.is_flat() or any(isinstance(value, TensorRef) for value in rest):
            return False
        is_whole = target.offset == 0 and target.numel == ref.numel
        if not is_whole and operation.function not in ELEMENTWISE_FILLS:
            return False
        started = started or is_whole
    return started


def _draw_range(
    operations: list[Operation], ref: TensorRef, seed: int, key: str, start: int, stop: int
) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of the flattened tensor, shape ``(stop - start,)``."""
    out = torch.empty(stop - start, dtype=ref.dtype)

    def fill(chunk: int) -> None:
        low, high = chunk * CHUNK, min((chunk + 1) * CHUNK, ref.numel)
        inside = start <= low and high <= stop
        buffer = out[low - start : high - start] if inside else torch.empty(high - low, dtype=ref.dtype)
        _run_chunk(operations, buffer, low, partial(key_of, seed, key, chunk))
        if not inside:
            first, last = max(low, start), min(high, stop)
            out[first - start : last - start] = buffer[first - low : last - low]

    chunks = range(start // CHUNK, -(-stop // CHUNK))
    if len(chunks) < 2 or torch.get_num_threads() == 1:
        for chunk in chunks:
            fill(chunk)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, chunks))
    return out


def _run_chunk(operations: list[Operation], buffer: torch.Tensor, low: int, key: Callable[[int], int]) -> None:
    """Runs the operations on one chunk, which begins at element ``low`` of its tensor."""
    with torch.no_grad():
        for number, operation in enumerate(operations):
            target: TensorRef = operation.args[0]
            first = max(target.offset - low, 0)
            last = min(target.offset + target.numel - low, buffer.numel())
            if last <= first:
                continue
            kwargs = dict(operation.kwargs)
            if operation.function in ELEMENTWISE_DRAWS:
                kwargs["generator"] = torch.Generator().manual_seed(key(number))
            operation.function(buffer[first:last], *operation.args[1:], **kwargs)


@contextmanager
def _recorded_init_functions(recorder: Recorder) -> Iterator[None]:
    """Context that records each init function that does nothing on meta as one operation."""
    from transformers import initialization

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(tensor: torch.Tensor, *args: Any, generator: object = None, **kwargs: Any) -> torch.Tensor:
            bound = dict(zip(_argument_names(function), args, strict=False)) | kwargs
            recorder.record_overwrite(function, tensor, bound)
            return tensor

        return record

    table = initialization.TORCH_INIT_FUNCTIONS
    originals = {name: getattr(nn.init, name) for name in EARLY_OUT_ON_META}
    before = {name: table[name] for name in EARLY_OUT_ON_META if name in table}
    wrapped = {name: wrap(function) for name, function in originals.items()}
    try:
        for name, function in wrapped.items():
            setattr(nn.init, name, function)
        table.update({name: wrapped[name] for name in before})
        yield
    finally:
        table.update(before)
        for name, function in originals.items():
            setattr(nn.init, name, function)


def _argument_names(function: Callable[..., Any]) -> list[str]:
    code = function.__code__
    return list(code.co_varnames[1 : code.co_argcount])
