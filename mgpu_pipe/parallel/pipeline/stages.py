"""Cutting a model into pipeline stages by deleting modules, so that names stay.

Every rank builds the whole model on the meta device and keeps the layers of its stages, which keep their numbers.
The rank of the first stage also keeps the embeddings, that of the last stage norm and head. Modules that pass their
input on replace the deleted ones, so transformers' own forward pass runs each stage. Masks and rotary tables come from
the micro-batch's fields, which every rank has.

A rank with two stages keeps both in one model, so parameters, layouts, optimizer, checkpoints, sharding and compiling
see one module. A :class:`StageView` activates one of its stages for the length of a forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mgpu_pipe.architectures.find import stages_of
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.local_shards import Layout, add_layouts
from mgpu_pipe.models.stage_placeholders import Received, Removed, RemovedAddend, RemovedEmbedding, Sent

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TIED = "mgpu_tied_across_stages"
"""The attribute of a root module that names the parameter it shares with a stage on another rank."""
SENT = "mgpu_sent"
"""The attribute of a root module that holds the :class:`Sent` of the active stage."""


@dataclass(frozen=True)
class StageParts:
    """Names of the modules of a model that stages share out; see :class:`mgpu_pipe.architectures.family.Stages`.

    A vision-language model's stages are those of its language model; the first one also holds the vision modules, which
    :attr:`after_embedding` names.
    """

    embedding: str
    layers: str
    norm: str | None
    head: str
    added: tuple[str, ...]
    after_embedding: tuple[str, ...]
    tuples: bool

    @classmethod
    def from_model(cls, model: nn.Module, ranks: int) -> StageParts:
        """The parts of a whole ``model``; ConfigError without stages, or for a parameter of no part."""
        whole = cast(Any, model)
        names = {id(module): name for name, module in model.named_modules()}
        text, base = whole.config.get_text_config(), str(getattr(model, "base_model_prefix", ""))
        modules, vision = dict(model.named_modules()), tuple[str, ...]()
        parent = base if base in modules else ""  # Llama 4's names no module
        if text is not whole.config or not parent:
            base = names[id(whole.get_decoder())]
        if text is not whole.config:
            children = (f"{parent}.{name}".lstrip(".") for name in modules[parent]._modules)
            vision = tuple(name for name in children if not f"{base}.".startswith(f"{name}."))
        stages, head = stages_of(text.model_type), names.get(id(whole.get_output_embeddings()))
        if stages is None or head is None:
            raise ConfigError("strategy.pp", ranks, "use pp=1", f"{text.model_type} cannot be cut into stages")
        path = "".join(f"{name}." for name in (base, stages.path) if name)
        norm = f"{path}{stages.norm}"
        parts = cls(
            path + stages.embedding,
            path + stages.layers,
            norm if norm in modules else None,
            head,
            tuple(path + name for name in stages.added),
            (*vision, *(path + name for name in stages.after_embedding)),
            stages.tuples,
        )
        paths = (parts.embedding, parts.layers, *parts.added, *parts.after_embedding, *parts.last)
        for name, _ in model.named_parameters():
            if not name.startswith(tuple(f"{part}." for part in paths)):
                raise ConfigError("strategy.pp", ranks, "use pp=1", f"{name} of {text.model_type} belongs to no stage")
        return parts

    @property
    def last(self) -> tuple[str, ...]:
        """The modules that only the last stage has."""
        return (self.head,) if self.norm is None else (self.norm, self.head)


class StageView:
    """One stage of the model that this rank holds.

    Attributes:
        model: this rank's model, shared by the views of all its stages.
        index: number of the stage.
        layers: the stage's layers, by their numbers in the whole model.
        first: whether the stage embeds.
        last: whether the stage has norm and head.
    """

    def __init__(self, model: nn.Module, parts: StageParts, index: int, layers: range, stages: int) -> None:
        self.model = model
        self.index, self.layers = index, layers
        self.first, self.last = index == 0, index == stages - 1
        self._received, self._sent = Received(parts.tuples), Sent(parts.tuples)
        self._embedding = RemovedEmbedding(hidden_width(model))
        self._swaps: list[tuple[nn.Module, str, nn.Module]] = []
        blocks = model.get_submodule(parts.layers)
        for name in blocks._modules:
            if int(name) == layers.start - 1 and not self.first:
                self._swaps.append((blocks, name, self._received))
            elif int(name) == layers.stop and not self.last:
                self._swaps.append((blocks, name, self._sent))
            elif int(name) not in layers:
                self._swaps.append((blocks, name, Removed(parts.tuples)))
        if not self.first:
            self._swaps.append((*_place(model, parts.embedding), self._embedding))
            self._swaps += [(*_place(model, name), RemovedAddend()) for name in parts.added]
        gone = (*(() if self.first else parts.after_embedding), *(() if self.last else parts.last))
        self._swaps += [(*_place(model, name), Removed()) for name in gone]

    @contextmanager
    def activate(self, received: torch.Tensor | None) -> Iterator[None]:
        """Turns the model into this stage alone, fed with ``received``, for the length of a forward pass."""
        replaced_modules = [(parent._modules, name, parent._modules[name]) for parent, name, _ in self._swaps]
        self._received.hidden_states = received
        if received is not None:
            self._embedding.dtype = received.dtype
        try:
            for parent, name, module in self._swaps:
                parent._modules[name] = module
            self.model.__dict__[SENT] = self._sent
            yield
        finally:
            self._received.hidden_states = self._sent.hidden_states = None
            for modules, name, child in replaced_modules:
                modules[name] = child

    def __call__(self, received: torch.Tensor | None, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Hidden states, or the last stage's logits, from the previous stage's, with keyword arguments of the model."""
        with self.activate(received):
            return cast(torch.Tensor, self.model(**inputs).logits)


def cut_stages(
    model: nn.Module, stage_layers: Sequence[range], stages_of_ranks: Sequence[Sequence[int]], rank: int
) -> list[StageView]:
    """Delete the modules of other ranks' stages from a meta ``model``, in place.

    A tied head on another rank than the embedding is a parameter there that the rank does not own. A :class:`Layout`
    records it under the embedding's name; see :func:`parallel.pipeline.schedule.reduce_tied_gradients`.

    Args:
        stage_layers: the layers of every stage.
        stages_of_ranks: the stages of every pipeline rank.
        rank: this process's pipeline rank.

    Returns:
        This rank's stages, ascending.

    Raises:
        ConfigError: the model cannot be cut into stages.
    """
    parts = StageParts.from_model(model, len(stages_of_ranks))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stages = len(stage_layers)
    mine = sorted(stages_of_ranks[rank])
    has_first, has_last = 0 in mine, stages - 1 in mine
    tied = model.get_submodule(parts.embedding).weight is model.get_submodule(parts.head).weight
    blocks = model.get_submodule(parts.layers)
    local_layers = {layer for stage in mine for layer in stage_layers[stage]}
    for name in list(blocks._modules):
        if int(name) not in local_layers:
            blocks._modules[name] = Removed(parts.tuples)
    if not has_first:
        _replace(model, parts.embedding, RemovedEmbedding(hidden_width(model)))
        for name in parts.added:
            _replace(model, name, RemovedAddend())
    for name in (*(() if has_first else parts.after_embedding), *(() if has_last else parts.last)):
        _replace(model, name, Removed())
    if tied and has_first != has_last:
        module = parts.embedding if has_first else parts.head
        weight = cast(nn.Parameter, model.get_submodule(module).weight)
        model.__dict__[TIED] = f"{module}.weight"
        if has_last:
            layout = Layout.uncut(names[id(weight)], tuple(weight.shape), owned=False)
            add_layouts(model, {f"{module}.weight": layout})
    # Before FSDP2's own hook, which must see the output for the next stage.
    model.register_forward_hook(_return_sent)
    return [StageView(model, parts, stage, stage_layers[stage], stages) for stage in mine]


def _return_sent(model: nn.Module, _: object, output: Any) -> Any:
    """A forward hook that returns the sent hidden states instead of logits, which only the last stage has."""
    sent = model.__dict__.get(SENT)
    if sent is not None and sent.hidden_states is not None:
        output.logits = sent.hidden_states
    return output


def tied_parameter(model: nn.Module) -> tuple[str, nn.Parameter] | None:
    """The parameter of this rank that the pipeline's first or last rank holds a copy of, with its local name."""
    name = model.__dict__.get(TIED)
    return None if name is None else (name, model.get_parameter(name))


def hidden_width(model: nn.Module) -> int:
    """Width of the hidden state of a token."""
    return int(cast(Any, model).config.get_text_config().hidden_size)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The parent of the submodule ``name``, and its attribute there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _replace(model: nn.Module, name: str, by: nn.Module) -> None:
    parent, attribute = _place(model, name)
    parent._modules[attribute] = by


# While a pipeline generates text, each stage keeps the keys and values of its layers. ``generate()`` asks its cache how
# many tokens it contains, and transformers' masks ask the first layer of a kind. A rank has no values of other stages'
# layers, so their entries contain zeros of one head and one element, of the same length.
STAGES = "mgpu_caches_of_stages"
"""The attribute of generate()'s cache that holds the caches of this rank's stages."""


def can_cache_stages(config: PreTrainedConfig) -> bool:
    """Whether all layers of a language model keep keys and values of tokens alone, and not states of another kind."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if config.is_encoder_decoder or config is not config.get_text_config():
        return False
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = DynamicCache(config=config).layers
    return len(layers) == config.num_hidden_layers and all(type(layer) in kinds for layer in layers)


def caches_of_stages(cache: Any, stages: Sequence[int]) -> Mapping[int, Any]:
    """Caches of a rank's ``stages``; the first's is ``cache``, the empty ``DynamicCache`` of ``generate()``, which
    reads its length."""
    if not hasattr(cache, STAGES):
        caches = [cache, *(copy.deepcopy(cache) for _ in stages[1:])]
        setattr(cache, STAGES, dict(zip(stages, caches, strict=True)))
    of_stages: Mapping[int, Any] = getattr(cache, STAGES)
    return of_stages


def lengthen_missing(cache: Any, layers: range, shape: tuple[int, ...], device: torch.device) -> None:
    """Add tokens, of ``shape`` (rows, tokens), to the entries of layers that the stage does not hold."""
    rows, tokens = shape
    nothing = torch.zeros(rows, 1, tokens, 1, device=device)
    for index in range(len(cache.layers)):
        if index not in layers:
            cache.update(nothing, nothing, index)
