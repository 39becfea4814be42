"""A function of whole matrices whose parts lie on several ranks.

Each cut matrix is put together on one rank, computed there, and its parts are sent back: two all-to-alls for as many
matrices as there are ranks, so that a rank holds one whole matrix at a time and no matrix is computed twice. Tensors
are cut as their :class:`~mgpu_pipe.models.layout.Fragment` say: by FSDP2, by tensor and by expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.models.layout import Fragment, Layout, fragments, layouts_of, unsharded_shape
from mgpu_pipe.models.parts import local_tensor
from mgpu_pipe.parallel.muon import Matrix, each_matrix

Unit = tuple[int, int]
"""A matrix: its parameter's index, and its place in the parameter's stack (0 where that is one matrix)."""


@dataclass(frozen=True)
class _Part:
    """A block of a matrix that a rank holds; ``sent``: this copy of it is what the matrix is put together from."""

    offsets: tuple[int, int]
    shape: tuple[int, int]
    sent: bool

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.narrow(0, self.offsets[0], self.shape[0]).narrow(1, self.offsets[1], self.shape[1])


class WholeMatrices:
    """See the module. Making one is a collective call of ``group``.

    Args:
        model: split, with its layouts.
        parameters: of matrices, or of stacks of them; the same on all ranks of ``group``.
        group: ranks that hold every matrix between them.
        device: where the matrices are computed.
        exchange: gives every rank's JSON.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        device: torch.device,
        exchange: Callable[[object, dist.ProcessGroup], list[Any]],
    ) -> None:
        self._group, self._device = group, device
        layouts, names = layouts_of(model), {id(p): name for name, p in model.named_parameters()}
        self._shapes: list[torch.Size] = []
        self._locals = [local_tensor(p).shape for p in parameters]
        self._blocks: dict[Unit, list[Fragment]] = {}
        mine: list[list[object]] = []
        for index, parameter in enumerate(parameters):
            layout = layouts.get(names[id(parameter)])
            global_shape = unsharded_shape(parameter, layout)
            self._shapes.append(torch.Size(global_shape[-2:]))
            for place, block, part in _units(parameter, layout):
                self._blocks.setdefault((index, place), []).append(block)
                mine.append([index, place, part.offsets, part.shape, part.sent])
        parts_of_ranks = [_by_unit(parts) for parts in exchange(mine, group)]
        self._held: dict[Unit, list[list[_Part]]] = {
            unit: [parts.get(unit, []) for parts in parts_of_ranks]
            for unit in sorted({u for parts in parts_of_ranks for u in parts})
        }
        self._rounds = self._plan(len(parts_of_ranks))

    def shape(self, index: int) -> torch.Size:
        """Of a matrix of the whole parameter."""
        return self._shapes[index]

    def _plan(self, size: int) -> list[list[Unit | None]]:
        """Who computes which cut matrix in which round: the most work first, each to the rank with the least."""
        cut = [
            unit
            for unit, by_rank in self._held.items()
            if any(parts and parts[0].shape != self._shapes[unit[0]] for parts in by_rank)
        ]
        work = {unit: self._shapes[unit[0]].numel() * min(self._shapes[unit[0]]) for unit in cut}
        loads, own = [0] * size, [list[Unit]() for _ in range(size)]
        for unit in sorted(cut, key=lambda u: (-work[u], u)):
            rank = loads.index(min(loads))
            loads[rank] += work[unit]
            own[rank].append(unit)
        return [[units[at] if at < len(units) else None for units in own] for at in range(max(map(len, own)))]

    def __call__(self, parts: list[torch.Tensor | None], function: Matrix, dtype: torch.dtype) -> list[torch.Tensor]:
        """``function`` of every matrix; this rank's parts of the results, in ``dtype``. A collective call.

        Args:
            parts: what this rank holds of every parameter's argument; None, on all ranks alike, counts as zeros.
        """
        results = [torch.empty(shape, dtype=dtype, device=self._device) for shape in self._locals]
        given = [
            torch.zeros_like(results[index]) if part is None else part.to(self._device)
            for index, part in enumerate(parts)
        ]
        cut = {unit for units in self._rounds for unit in units}
        for unit, blocks in self._blocks.items():
            if unit not in cut:
                for block in blocks:  # one, which is all of it
                    source, target = (_matrix(block.of(t[unit[0]])) for t in (given, results))
                    target.copy_(each_matrix(source, function, dtype))
        for units in self._rounds:
            self._round(units, given, results, function, dtype)
        return [result if part is None else result.to(part.device) for result, part in zip(results, parts, strict=True)]

    def _round(
        self,
        units: list[Unit | None],
        given: list[torch.Tensor],
        filled: list[torch.Tensor],
        function: Matrix,
        dtype: torch.dtype,
    ) -> None:
        """Each rank computes one of ``units``."""
        rank = self._group.rank()
        mine = units[rank]
        # There: from every rank what it sends of my matrix, and from me what I send of theirs.
        outgoing = [self._pieces(unit, given, sent=True) for unit in units]
        expected = [] if mine is None else [[p for p in parts if p.sent] for parts in self._held[mine]]
        arrived = self._exchange(outgoing, expected, dtype, len(units))
        results: list[list[torch.Tensor]] = [[] for _ in units]
        if mine is not None:
            matrix = torch.empty(self._shapes[mine[0]], dtype=dtype, device=self._device)
            for part, values in zip((p for parts in expected for p in parts), arrived, strict=True):
                part.of(matrix).copy_(values)
            result = function(matrix)
            results = [[part.of(result) for part in parts] for parts in self._held[mine]]
        # And back, to all that hold a copy.
        targets = [self._pieces(unit, filled, sent=False) for unit in units]
        wanted = [[] if unit is None else self._held[unit][rank] for unit in units]
        back = self._exchange(results, wanted, dtype, len(units))
        for target, values in zip((t for pieces in targets for t in pieces), back, strict=True):
            target.copy_(values)

    def _pieces(self, unit: Unit | None, tensors: list[torch.Tensor], sent: bool) -> list[torch.Tensor]:
        """What I hold of a matrix, or what I send of it, as views."""
        if unit is None:
            return []
        parts = self._held[unit][self._group.rank()]
        blocks = [_matrix(block.of(tensors[unit[0]])) for block in self._blocks.get(unit, [])]
        return [block for block, part in zip(blocks, parts, strict=True) if part.sent or not sent]

    def _exchange(
        self, outgoing: list[list[torch.Tensor]], expected: list[list[_Part]], dtype: torch.dtype, size: int
    ) -> list[torch.Tensor]:
        """All ranks' blocks for me, rank by rank."""
        empty = torch.empty(0, dtype=dtype, device=self._device)
        out = torch.cat([empty, *(block.to(dtype).reshape(-1) for blocks in outgoing for block in blocks)])
        sizes = [sum(block.numel() for block in blocks) for blocks in outgoing]
        counts = [[part.numel for part in parts] for parts in expected] or [[]] * size
        received = torch.empty(sum(map(sum, counts)), dtype=dtype, device=self._device)
        dist.all_to_all_single(received, out, [sum(count) for count in counts], sizes, group=self._group)
        flat = [part for parts in expected for part in parts]
        values = received.split([count for one in counts for count in one]) if flat else ()
        return [value.view(part.shape) for value, part in zip(values, flat, strict=True)]


def _units(parameter: torch.Tensor, layout: Layout | None) -> list[tuple[int, Fragment, _Part]]:
    """What this rank holds of each matrix of ``parameter``: its place, the block of the local tensor, the part."""
    owned = layout is None or layout.owned
    units = []
    for block in fragments(parameter, layout):
        *stack, rows, columns = zip(block.local, block.offsets, block.shape, strict=True)
        part = _Part((rows[1], columns[1]), (rows[2], columns[2]), owned)
        count = stack[0][2] if stack else 1
        for step in range(count):
            first = tuple((local + step, offset + step, 1) for local, offset, _ in stack)
            local, offsets, shape = zip(*first, rows, columns, strict=True)
            units.append((offsets[0] if stack else 0, Fragment(local, offsets, shape), part))
    return units


def _matrix(block: torch.Tensor) -> torch.Tensor:
    """A block without the dim of the stack."""
    return block if block.dim() == 2 else block[0]


def _by_unit(listed: list[list[object]]) -> dict[Unit, list[_Part]]:
    by_unit: dict[Unit, list[_Part]] = {}
    for index, place, offsets, shape, sent in listed:
        part = _Part(tuple(offsets), tuple(shape), bool(sent))  # type: ignore[arg-type]
        by_unit.setdefault((int(index), int(place)), []).append(part)  # type: ignore[call-overload]
    return by_unit
