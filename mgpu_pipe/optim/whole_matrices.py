"""Function of whole matrices that are sharded over ranks.

Each cut matrix is assembled and computed on one rank, and its parts are sent back: two all-to-alls for as many matrices
as there are ranks. So a rank has one whole matrix at a time and no matrix is computed twice. Tensors are cut by their
:class:`~mgpu_pipe.models.local_shards.Fragment`: by FSDP2, tensor and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mgpu_pipe.models.local_shards import Fragment, Layout, fragments, layouts_of, local_tensor, unsharded_shape
from mgpu_pipe.optim.muon import Matrix, each_matrix
from mgpu_pipe.parallel.rank_exchange import exchange_json

Unit = tuple[int, int]
"""Matrix: its parameter's index, and its index in the parameter's stack (0 for a single matrix)."""


@dataclass(frozen=True)
class _Part:
    """Block of a matrix on a rank. ``sent``: whether the matrix is assembled from this copy."""

    offsets: tuple[int, int]
    shape: tuple[int, int]
    sent: bool

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def view(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.narrow(0, self.offsets[0], self.shape[0]).narrow(1, self.offsets[1], self.shape[1])


class WholeMatrices:
    """Applies functions to whole matrices. Its construction is a collective call of ``group``.

    Args:
        model: sharded, with layouts.
        parameters: matrices or stacks of them; the same on all ranks of ``group``.
        group: ranks that together have every matrix.
        device: device of the computation.
    """

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device
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
        parts_of_ranks = [_by_unit(parts) for parts in exchange_json(mine, group)]
        self._parts: dict[Unit, list[list[_Part]]] = {
            unit: [parts.get(unit, []) for parts in parts_of_ranks]
            for unit in sorted({u for parts in parts_of_ranks for u in parts})
        }
        self._rounds = self._plan(len(parts_of_ranks))

    def shape(self, index: int) -> torch.Size:
        """Shape of a matrix of the whole parameter."""
        return self._shapes[index]

    def _plan(self, size: int) -> list[list[Unit | None]]:
        """Assigns cut matrices to ranks and rounds: most work first, each to the rank with the least."""
        cut = [
            unit
            for unit, by_rank in self._parts.items()
            if any(parts and parts[0].shape != self._shapes[unit[0]] for parts in by_rank)
        ]
        work = {unit: self._shapes[unit[0]].numel() * min(self._shapes[unit[0]]) for unit in cut}
        loads, assigned = [0] * size, [list[Unit]() for _ in range(size)]
        for unit in sorted(cut, key=lambda u: (-work[u], u)):
            rank = loads.index(min(loads))
            loads[rank] += work[unit]
            assigned[rank].append(unit)
        return [
            [units[index] if index < len(units) else None for units in assigned]
            for index in range(max(map(len, assigned)))
        ]

    def __call__(self, parts: list[torch.Tensor | None], function: Matrix, dtype: torch.dtype) -> list[torch.Tensor]:
        """This rank's parts of ``function`` of every matrix, in ``dtype``. A collective call.

        Args:
            parts: this rank's part of every argument; None, on all ranks alike, means zeros.
        """
        results = [torch.empty(shape, dtype=dtype, device=self._device) for shape in self._locals]
        arguments = [
            torch.zeros_like(results[index]) if part is None else part.to(self._device)
            for index, part in enumerate(parts)
        ]
        cut = {unit for units in self._rounds for unit in units}
        for unit, blocks in self._blocks.items():
            if unit not in cut:
                for block in blocks:  # a single block, the whole matrix
                    source, target = (_matrix(block.view(t[unit[0]])) for t in (arguments, results))
                    target.copy_(each_matrix(source, function, dtype))
        for units in self._rounds:
            self._round(units, arguments, results, function, dtype)
        return [result if part is None else result.to(part.device) for result, part in zip(results, parts, strict=True)]

    def _round(
        self,
        units: list[Unit | None],
        arguments: list[torch.Tensor],
        filled: list[torch.Tensor],
        function: Matrix,
        dtype: torch.dtype,
    ) -> None:
        """Computes one of ``units`` on each rank."""
        rank = self._group.rank()
        mine = units[rank]
        # Send: receive my matrix from every rank, and send my blocks of the others.
        outgoing = [self._pieces(unit, arguments, sent=True) for unit in units]
        expected = [] if mine is None else [[p for p in parts if p.sent] for parts in self._parts[mine]]
        arrived = self._exchange(outgoing, expected, dtype, len(units))
        results: list[list[torch.Tensor]] = [[] for _ in units]
        if mine is not None:
            matrix = torch.empty(self._shapes[mine[0]], dtype=dtype, device=self._device)
            for part, values in zip((p for parts in expected for p in parts), arrived, strict=True):
                part.view(matrix).copy_(values)
            result = function(matrix)
            results = [[part.view(result) for part in parts] for parts in self._parts[mine]]
        # Return results to all ranks with a copy.
        targets = [self._pieces(unit, filled, sent=False) for unit in units]
        wanted = [[] if unit is None else self._parts[unit][rank] for unit in units]
        back = self._exchange(results, wanted, dtype, len(units))
        for target, values in zip((t for pieces in targets for t in pieces), back, strict=True):
            target.copy_(values)

    def _pieces(self, unit: Unit | None, tensors: list[torch.Tensor], sent: bool) -> list[torch.Tensor]:
        """Views of this rank's blocks of a matrix, or only of those to send."""
        if unit is None:
            return []
        parts = self._parts[unit][self._group.rank()]
        blocks = [_matrix(block.view(tensors[unit[0]])) for block in self._blocks.get(unit, [])]
        return [block for block, part in zip(blocks, parts, strict=True) if part.sent or not sent]

    def _exchange(
        self, outgoing: list[list[torch.Tensor]], expected: list[list[_Part]], dtype: torch.dtype, size: int
    ) -> list[torch.Tensor]:
        """Exchanges blocks; returns those for this rank, rank by rank."""
        empty = torch.empty(0, dtype=dtype, device=self._device)
        out = torch.cat([empty, *(block.to(dtype).reshape(-1) for blocks in outgoing for block in blocks)])
        sizes = [sum(block.numel() for block in blocks) for blocks in outgoing]
        counts = [[part.numel for part in parts] for parts in expected] or [[]] * size
        received = torch.empty(sum(map(sum, counts)), dtype=dtype, device=self._device)
        dist.all_to_all_single(received, out, [sum(count) for count in counts], sizes, group=self._group)
        flat = [part for parts in expected for part in parts]
        values = received.split([count for of_rank in counts for count in of_rank]) if flat else ()
        return [value.view(part.shape) for value, part in zip(values, flat, strict=True)]


def _units(parameter: torch.Tensor, layout: Layout | None) -> list[tuple[int, Fragment, _Part]]:
    """Index, local block and part of each matrix of ``parameter`` on this rank."""
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
    """Block without the dim of the stack."""
    return block if block.dim() == 2 else block[0]


def _by_unit(listed: list[list[object]]) -> dict[Unit, list[_Part]]:
    by_unit: dict[Unit, list[_Part]] = {}
    for index, place, offsets, shape, sent in listed:
        part = _Part(tuple(offsets), tuple(shape), bool(sent))  # type: ignore[arg-type]
        by_unit.setdefault((int(index), int(place)), []).append(part)  # type: ignore[call-overload]
    return by_unit
