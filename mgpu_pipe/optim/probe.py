"""Probes properties of an optimizer on tiny tensors.

As a program it reads one JSON object (``target``, ``lr``, ``weight_decay``, ``options``, ``cuda``) and prints the
:class:`Findings` as another. The launcher, which does not import torch, runs it before any worker starts.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mgpu_pipe.config.targets.build_target import resolve_target
from mgpu_pipe.errors import ConfigError, MgpuError, print_line
from mgpu_pipe.import_path import allow_own_classes

STEPS = 4
OUTLIER = 1e4
"""Factor of the third step's gradients, so that an optimizer that clips by a norm does so."""
TOLERANCE = 1e-4
"""Share of a tensor's largest change: vectorised loops round the ends of a tensor differently."""
FAULTS = (TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class Findings:
    """Properties of an optimizer.

    Attributes:
        refusal: reason why the optimizer cannot be used, or None.
        option: the faulty option; ``default`` is its default.
        scope: scope of an element's update: that ``element``, its ``tensor``, or the whole ``model``.
        in_place: whether parameters are changed in place, not replaced.
        state_at_start: whether the constructor makes the state, not the first step.
    """

    refusal: str | None = None
    option: str | None = None
    default: str | None = None
    scope: str = "model"
    in_place: bool = True
    state_at_start: bool = False


def optimizer_class(target: str, lr: float, options: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Class of ``optimizer._target_`` and its other arguments; ConfigError if it is no optimizer that can be used
    so."""
    cls, arguments = resolve_target({"_target_": target, "lr": lr, **options}, "torch.optim.Optimizer", "optimizer")
    closure = inspect.signature(getattr(cls, "step")).parameters.get("closure")  # noqa: B009
    if closure is not None and closure.default is inspect.Parameter.empty:
        reason = f"{cls.__name__} evaluates the loss itself, several times a step"
        raise ConfigError("optimizer._target_", target, "use an optimizer that takes given gradients", reason)
    return cls, arguments


Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def probe(target: str, lr: float, weight_decay: float, options: Mapping[str, Any], cuda: bool = False) -> Findings:
    """Builds the optimizer and takes a few steps, without options for CUDA unless the run uses it."""
    usable = {name: value for name, value in options.items() if not (cuda and name in ("capturable", "fused"))}
    try:
        make = _maker(target, lr, weight_decay, usable)
        unsharded = _run(make, _tensors(), range(STEPS))
    except MgpuError as error:
        return Findings(str(error))
    except FAULTS as error:
        return _blame(target, lr, weight_decay, usable, error)
    refusal = _resume_fault(make, unsharded)
    if refusal is not None:
        return Findings(refusal)
    at_start = bool(_run(make, _tensors(), []).optimizer.state)
    return Findings(scope=_scope(make, unsharded), in_place=unsharded.in_place, state_at_start=at_start)


@dataclass
class _Run:
    """Tensors after some steps, and the optimizer."""

    optimizer: torch.optim.Optimizer
    parameters: list[torch.Tensor]
    values: list[torch.Tensor]
    in_place: bool


def _tensors() -> list[torch.Tensor]:
    """A random matrix and vector."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 8, generator=generator), torch.randn(5, generator=generator)]


def _gradient(step: int, index: int, shape: torch.Size) -> torch.Tensor:
    """Gradient with rows of very different sizes."""
    generator = torch.Generator().manual_seed(100 * step + index + 1)
    gradient = torch.randn(shape, generator=generator)
    gradient *= torch.logspace(-2, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return gradient * (OUTLIER if step == 2 else 1.0)


Cut = Callable[[torch.Tensor], torch.Tensor]


def _run(
    make: Make,
    tensors: Sequence[torch.Tensor],
    steps: Sequence[int],
    *,
    only: Sequence[int] | None = None,
    cut: Cut = lambda tensor: tensor,
    state: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> _Run:
    """Take ``steps`` with ``cut`` of the ``tensors`` in ``only``, resuming from the ``state`` of every parameter."""
    torch.manual_seed(seed)
    indices = range(len(tensors)) if only is None else only
    parameters: list[torch.Tensor] = [torch.nn.Parameter(cut(tensors[index]).clone()) for index in indices]
    optimizer = make(parameters)
    for parameter, values in zip(parameters, state or [], strict=False):
        optimizer.state[parameter] = dict(values)
    places = [parameter.data_ptr() for parameter in parameters]
    for step in steps:
        for index, parameter in zip(indices, parameters, strict=True):
            parameter.grad = cut(_gradient(step, index, tensors[index].shape)).clone()
        optimizer.step()
    in_place = places == [parameter.data_ptr() for parameter in parameters]
    return _Run(optimizer, parameters, [parameter.detach().clone() for parameter in parameters], in_place)


def _maker(target: str, lr: float, weight_decay: float, options: Mapping[str, Any]) -> Make:
    cls, arguments = optimizer_class(target, lr, options)
    if "weight_decay" in inspect.signature(cls).parameters:
        arguments = {**arguments, "weight_decay": weight_decay}
    return lambda parameters: cls(parameters, **arguments)


def _blame(target: str, lr: float, weight_decay: float, options: Mapping[str, Any], error: Exception) -> Findings:
    """Which option it is: the one without which all goes well."""
    said = " ".join(str(error).split()) or type(error).__name__
    reason = said if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {said}"
    for option in options:
        rest = {name: value for name, value in options.items() if name != option}
        try:
            _run(_maker(target, lr, weight_decay, rest), _tensors(), range(STEPS))
        except (MgpuError, *FAULTS):
            continue
        cls, _ = optimizer_class(target, lr, rest)
        parameter = inspect.signature(cls).parameters.get(option)
        known = parameter is not None and parameter.default is not inspect.Parameter.empty
        return Findings(reason, option, repr(parameter.default) if known and parameter is not None else None)
    return Findings(f"it cannot take a step: {reason}")


def _resume_fault(make: Make, unsharded: _Run) -> str | None:
    """Reason why a run could not resume from a checkpoint of the state, or None."""
    if not _close(unsharded, _run(make, _tensors(), range(STEPS), seed=1).values):
        return "its update draws random numbers, which differ from rank to rank and after a resume"
    for parameter in unsharded.parameters:
        for name, value in unsharded.optimizer.state[parameter].items():
            if not isinstance(value, torch.Tensor | bool | int | float | None):
                return (
                    f"its state {name!r} is a {type(value).__name__}, neither a tensor nor a number, "
                    "and cannot be saved"
                )
    half = _run(make, _tensors(), range(STEPS // 2))
    state = [dict(half.optimizer.state[parameter]) for parameter in half.parameters]
    try:
        rest = _run(make, half.values, range(STEPS // 2, STEPS), state=state)
    except FAULTS:
        return "it cannot resume from its saved state"
    if not _close(unsharded, rest.values):
        return "it keeps state outside of its parameters' state, which no checkpoint holds"
    return None


def _scope(make: Make, unsharded: _Run) -> str:
    tensors = _tensors()
    try:
        alone = [_run(make, tensors, range(STEPS), only=[index]).values[0] for index in range(len(tensors))]
    except FAULTS:
        return "model"
    if not _close(unsharded, alone):
        return "model"
    cuts: list[Cut] = [
        lambda t: t[:2],
        lambda t: t[2:],
        lambda t: t[:0],
        lambda t: t[..., :3],
        lambda t: t[..., 3:],
        lambda t: t.reshape(-1)[:4],
        lambda t: t.reshape(-1)[4:],
    ]
    for cut in cuts:
        for index in range(len(tensors)):
            try:
                part = _run(make, tensors, range(STEPS), only=[index], cut=cut).values[0]
            except FAULTS:
                return "tensor"
            if not _same(cut(tensors[index]), cut(unsharded.values[index]), part):
                return "tensor"
    return "element"


def _close(unsharded: _Run, values: Sequence[torch.Tensor]) -> bool:
    return all(_same(*triple) for triple in zip(_tensors(), unsharded.values, values, strict=True))


def _same(before: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor) -> bool:
    if not expected.numel():
        return actual.shape == expected.shape
    largest = float((expected - before).abs().max())
    return bool((expected - actual).abs().max() <= TOLERANCE * largest) or torch.equal(expected, actual)


def main() -> None:
    allow_own_classes()
    request = json.load(sys.stdin)
    print_line(json.dumps(asdict(probe(**request))))


if __name__ == "__main__":
    main()
