"""Cutting a model into pipeline stages by deleting modules, so that names stay.

Every rank builds the whole model on the meta device and keeps the layers of its own stages under their own numbers;
the rank of the first stage also keeps the embeddings, that of the last one norm and head. What is gone is replaced by
modules that hand their input on, so transformers' own forward pass runs each stage, with its masks and rotary tables
made from the micro-batch's fields, which every rank has.

A rank with two stages keeps both in one model, so parameters, layouts, optimizer, checkpoints, sharding and compiling
see one module; a :class:`StageView` shows one of its stages for the length of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.layout import Layout, add_layouts
from mgpu_pipe.models.stage_parts import STAGE_PARTS, StageParts
from mgpu_pipe.models.stage_placeholders import Received, Removed, RemovedEmbedding, RemovedHead

TIED = "mgpu_tied_across_stages"
"""The attribute of a root module that names its parameter that a stage on another rank holds too."""


class StageView:
    """One stage of the model that this rank holds.

    Attributes:
        model: this rank's model, shared by the views of all its stages.
        index: of the stage.
        layers: the stage's, by their numbers in the whole model.
        first: whether it embeds; last: whether it has norm and head.
    """

    def __init__(self, model: nn.Module, parts: StageParts, index: int, layers: range, stages: int) -> None:
        self.model = model
        self.index, self.layers = index, layers
        self.first, self.last = index == 0, index == stages - 1
        self._received = Received()
        width = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self._embedding = RemovedEmbedding(width)
        self._swaps: list[tuple[nn.Module, str, nn.Module]] = []
        blocks = model.get_submodule(parts.layers)
        for name in blocks._modules:
            if int(name) not in layers:
                stand_in = self._received if not self.first and int(name) == layers.start - 1 else Removed()
                self._swaps.append((blocks, name, stand_in))
        if not self.first:
            self._swaps += [(*_place(model, name), self._embedding) for name in parts.first]
        if not self.last:
            self._swaps += [(*_place(model, parts.norm), Removed()), (*_place(model, parts.head), RemovedHead())]

    @contextmanager
    def shown(self, received: torch.Tensor | None) -> Iterator[None]:
        """For the length of a forward pass the model is this stage alone, fed with ``received``."""
        held = [(parent._modules, name, parent._modules[name]) for parent, name, _ in self._swaps]
        self._received.hidden_states = received
        if received is not None:
            self._embedding.dtype = received.dtype
        try:
            for parent, name, module in self._swaps:
                parent._modules[name] = module
            yield
        finally:
            self._received.hidden_states = None
            for modules, name, whole in held:
                modules[name] = whole

    def __call__(self, received: torch.Tensor | None, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Hidden states, or the last stage's logits, of a micro-batch, given what the stage before made of it.

        Args:
            inputs: keyword arguments of the model's forward pass.
        """
        with self.shown(received):
            return cast(torch.Tensor, self.model(**inputs).logits)


def cut_stages(
    model: nn.Module, stage_layers: Sequence[range], stages_of_ranks: Sequence[Sequence[int]], rank: int
) -> list[StageView]:
    """Delete from a meta ``model`` what other ranks' stages hold, in place.

    A tied head that ends up on another rank than the embedding is a parameter of its own there, recorded by a
    :class:`Layout` under the embedding's name and not owned; see :func:`parallel.pipeline_tied.reduce_tied_gradients`.

    Args:
        stage_layers: the layers of every stage.
        stages_of_ranks: the stages of every pipeline rank.
        rank: this process's pipeline rank.

    Returns:
        This rank's stages, ascending.

    Raises:
        ConfigError: a family that is not known to run in parts.
    """
    model_type = model.config.model_type  # type: ignore[union-attr]
    parts = STAGE_PARTS.get(str(model_type))
    if parts is None:
        fix = f"use pp=1, or one of {', '.join(sorted(STAGE_PARTS))}"
        raise ConfigError("strategy.pp", len(stages_of_ranks), fix, f"{model_type} cannot be cut into stages")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stages = len(stage_layers)
    mine = sorted(stages_of_ranks[rank])
    has_first, has_last = 0 in mine, stages - 1 in mine
    tied = model.get_submodule(parts.embedding).weight is model.get_submodule(parts.head).weight
    blocks = model.get_submodule(parts.layers)
    kept = {layer for stage in mine for layer in stage_layers[stage]}
    for name in list(blocks._modules):
        if int(name) not in kept:
            blocks._modules[name] = Removed()
    for name in () if has_first else parts.first:
        _replace(model, name, RemovedEmbedding(int(model.config.hidden_size)))  # type: ignore[union-attr, arg-type]
    for name in () if has_last else parts.last:
        _replace(model, name, Removed())
    if tied and has_first != has_last:
        module = parts.embedding if has_first else parts.head
        weight = cast(nn.Parameter, model.get_submodule(module).weight)
        model.__dict__[TIED] = f"{module}.weight"
        if has_last:
            layout = Layout.uncut(names[id(weight)], tuple(weight.shape), owned=False)
            add_layouts(model, {f"{module}.weight": layout})
    return [StageView(model, parts, stage, stage_layers[stage], stages) for stage in mine]


def tied_parameter(model: nn.Module) -> tuple[str, nn.Parameter] | None:
    """The parameter of this rank that the pipeline's first or last rank holds a copy of, with its local name."""
    name = model.__dict__.get(TIED)
    return None if name is None else (name, model.get_parameter(name))


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the submodule called ``name``, and what it calls it."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _replace(model: nn.Module, name: str, by: nn.Module) -> None:
    parent, attribute = _place(model, name)
    parent._modules[attribute] = by
