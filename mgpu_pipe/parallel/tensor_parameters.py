"""Cutting parameters of a model in place, and the layouts that say what was cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from mgpu_pipe.models.layout import Layout, add_layouts, layouts_of


class CutParameters:
    """The parameters of ``model`` by name and by the modules that hold them, and what one axis makes of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._originals = dict(model.named_parameters())  # kept, for the tables below go by their addresses
        self._names = {id(parameter): name for name, parameter in self._originals.items()}
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append((module, attribute))
        self._before = layouts_of(model)
        self._layouts: dict[str, Layout] = {}

    def name(self, parameter: nn.Parameter) -> str:
        """The name of ``parameter``, before or after it was cut."""
        return self._names[id(parameter)]

    def is_cut(self, parameter: nn.Parameter) -> bool:
        return self.name(parameter) in self._layouts

    def cut(
        self, module: nn.Module, attribute: str, dim: int, ranges: Sequence[tuple[int, int]], owned: bool = True
    ) -> None:
        """Replace a parameter, in every module that holds it, by its ``ranges`` along ``dim``."""
        parameter = module._parameters[attribute]
        assert parameter is not None
        name, before = self.name(parameter), self._before.get(self.name(parameter))
        assert before is None or before.shape == before.whole, f"{name} is cut already"
        parts = [parameter.detach().narrow(dim, start, stop - start) for start, stop in ranges]
        local = nn.Parameter(torch.cat(parts, dim), requires_grad=parameter.requires_grad)
        for holder, held_as in self._holders[id(parameter)]:
            holder._parameters[held_as] = local
        self._names[id(local)], self._holders[id(local)] = name, self._holders[id(parameter)]
        self._layouts[name] = Layout(
            name if before is None else before.name,
            tuple(parameter.shape),
            dim,
            tuple(ranges),
            owned and (before is None or before.owned),
        )

    def record(self, left_alone: Iterable[str], owns_the_rest: bool) -> None:
        """Put the layouts on the model: of what was cut, and of the rest, which every rank of the axis holds."""
        skipped = set(left_alone)
        for name, parameter in self._model.named_parameters():
            if name in self._layouts or name in skipped:
                continue
            before = self._before.get(name) or Layout.uncut(name, tuple(parameter.shape))
            owned = before.owned and owns_the_rest
            self._layouts[name] = Layout(before.name, before.whole, before.dim, before.ranges, owned)
        add_layouts(self._model, self._layouts)
