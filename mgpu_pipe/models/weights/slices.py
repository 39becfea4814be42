"""Loads a folder's safetensors weights into a sharded model: each rank reads its parts.

If a checkpoint's tensor is a parameter, perhaps under another name, the rank reads only its rows. If transformers
builds a parameter from several tensors (experts of a mixture, fused projections), its conversion builds that parameter,
which is then cut. So no rank has more than its parts and one parameter in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.adapters.low_rank import MAGNITUDE
from mgpu_pipe.models.adapters.peft_folder import first_adapters, lengths, magnitude_layer, other_names
from mgpu_pipe.models.adapters.qlora import pack, packed_parameters, unquantised_shapes
from mgpu_pipe.models.build import build_meta, materialise_empty, tied_sources
from mgpu_pipe.models.fields import class_of
from mgpu_pipe.models.local_shards import Layout, layouts_of, local_parts, local_tensor, unsharded_shape
from mgpu_pipe.models.weights.folder import check_model_folder, weight_files, whole_folder
from mgpu_pipe.models.weights.pretrained import UNTIED, adds_rows, check_loading, stored_buffers, with_new_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NO_ADAPTERS = PeftConfig()
ROWS = 4096
"""Rows of two tensors that are compared at once."""
TakeTensor = Callable[[str, Any], None]
"""Function that copies its part of a named parameter, from a whole tensor or a lazy slice of a file."""


@dataclass(frozen=True)
class FolderWeights:
    """Fills a meta model with the weights of the folder ``source.path``.

    Attributes:
        seed, peft: as in :func:`read_folder`.
    """

    source: ModelConfig
    seed: int | None = None
    peft: PeftConfig = field(default_factory=PeftConfig)

    def __call__(self, model: PreTrainedModel, device: torch.device) -> None:
        fill_from_folder(model, self.source, device, self.seed, self.peft)


@dataclass(frozen=True)
class _Source:
    """Source of a parameter: names in the checkpoint, and whether they are converted or only renamed."""

    keys: list[str]
    converted: bool


@dataclass(frozen=True)
class _Target:
    """Parameter to fill, with the layout of this rank's part."""

    parameter: torch.nn.Parameter
    layout: Layout | None

    @property
    def whole(self) -> tuple[int, ...]:
        return unsharded_shape(self.parameter, self.layout)

    @torch.no_grad()
    def copy(self, stored: Any) -> None:
        """Copies this rank's parts of ``stored``, a whole tensor or a lazy slice of a file."""
        local = local_tensor(self.parameter)
        for block, part in local_parts(self.parameter, self.layout):
            ranges = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))
            block.view(local).copy_(stored[ranges] if ranges else stored[...])


def _targets(model: torch.nn.Module) -> dict[str, _Target]:
    """Parameters with a part on this rank, under every name in the unsharded model."""
    layouts = layouts_of(model)
    by_identity = {id(parameter): layouts.get(name) for name, parameter in model.named_parameters()}
    targets: dict[str, _Target] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        target = _Target(parameter, by_identity[id(parameter)])
        targets[name] = target
        if target.layout is not None:
            targets.setdefault(target.layout.name, target)
    return targets


def fill_from_folder(
    model: PreTrainedModel,
    source: ModelConfig,
    device: torch.device | str,
    seed: int | None = None,
    peft: PeftConfig = NO_ADAPTERS,
) -> PreTrainedModel:
    """Fills the meta ``model`` (of ``source``, sharded or not) from the folder ``source.path``, in place.

    Args:
        seed, peft: as in :func:`read_folder`.

    Raises:
        ModelFolderError: no or damaged weights, or tensors missing, unexpected or of other shapes.
    """
    _checked_folder(source)
    materialise_empty(model, device)
    targets = _targets(model)
    parameters = {name: target.parameter for name, target in targets.items()}
    shapes = {name: target.whole for name, target in targets.items()}

    def take(name: str, stored: Any) -> None:
        targets[name].copy(stored)

    read_folder(source, parameters, shapes, take, type(model).__name__, seed, peft, stored_buffers(model))
    return model.train()


def folder_buffers(source: ModelConfig, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Values in the folder ``source.path`` for :func:`stored_buffers` of the unsharded ``model``."""
    from safetensors import safe_open

    buffers = {name: torch.zeros_like(buffer, device="cpu") for name, buffer in stored_buffers(model).items()}
    if buffers:
        folder = _checked_folder(source)
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(str(folder / name), "pt")) for name in weight_files(folder)]
            readers = {key: partial(file.get_slice, key) for file in files for key in file.keys()}  # noqa: SIM118
            lost = read_tensors(model, readers, {}, {}, lambda name, stored: None, buffers=buffers)
        missing = lost["missing_keys"] | lost["mismatched_keys"]
        buffers = {name: buffer for name, buffer in buffers.items() if name not in missing}
    return buffers


def read_folder(
    source: ModelConfig,
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    take: TakeTensor,
    architecture: str,
    seed: int | None = None,
    peft: PeftConfig = NO_ADAPTERS,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Passes every parameter of ``source`` in its folder to ``take``, one by one.

    Args:
        parameters: parameters of the model by all their names; tied ones are the same object.
        shapes: whole shapes, by the same names.
        architecture: name of the model's class.
        seed: seed of tensors that the folder's class lacks, e.g. a new head; None: they count as missing.
        peft: the model's adapters, which the folder does not have.
        buffers: :func:`stored_buffers` on this rank, which are filled.

    Raises:
        ModelFolderError: no or damaged weights, or tensors missing, unexpected or of other shapes.
    """
    from safetensors import safe_open

    folder = _checked_folder(source)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(str(folder / name), "pt")) for name in weight_files(folder)]
        readers = {key: partial(file.get_slice, key) for file in files for key in file.keys()}  # noqa: SIM118
        twin = build_meta(source, class_of([architecture]))
        add_adapters(twin, peft.without_quantisation())
        norms: dict[str, torch.Tensor] = {}
        stored_shapes = unquantised_shapes(twin, shapes)

        def take_as_trained(name: str, stored: Any) -> None:
            layer, _, kind = name.rpartition(".")
            if packed_parameters(name)[1] in shapes:
                for part in packed_parameters(name):
                    take(part, pack(twin, part, stored[...].float()))
                return
            take(name, stored)
            if kind == "weight" and peft.init_from is not None and f"{layer}.{MAGNITUDE}" in parameters:
                norms[layer] = lengths(twin, layer, stored[...].float())

        complete = partial(_new_rows, source, twin, seed)
        known = {name: parameters[name] for name in stored_shapes}
        read = read_tensors(twin, readers, known, stored_shapes, take_as_trained, complete, buffers or {})
        for name, value in check_loading(source, read, twin, seed).items():
            take(name, value)
        _take_first_adapters(peft, twin, parameters, norms, take)


def _take_first_adapters(
    peft: PeftConfig,
    twin: PreTrainedModel,
    parameters: Mapping[str, torch.nn.Parameter],
    norms: Mapping[str, torch.Tensor],
    take: TakeTensor,
) -> None:
    """Passes the adapters of ``peft.init_from`` to ``take``; ``norms`` are the row norms of layers with magnitudes."""
    tied = other_names(twin)
    for name, value in first_adapters(peft, twin):
        here = next((alias for alias in (name, *tied.get(name, ())) if alias in parameters), None)
        if here is not None:
            layer = magnitude_layer(name)
            take(here, value if layer is None else value - norms[layer])


def read_tensors(
    twin: PreTrainedModel,
    readers: Mapping[str, Callable[[], Any]],
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    take: TakeTensor,
    complete: Callable[[str, Any], torch.Tensor | None] = lambda name, stored: None,
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, set[str]]:
    """Passes to ``take`` every parameter that the tensors provide, under a folder's or the modules' names.

    Args:
        twin: the same model on the meta device, unsharded.
        readers: opens a tensor by name: whole, or a slice of a safetensors file.
        parameters, shapes: as in :func:`read_folder`.
        complete: makes a parameter from a tensor of another shape; None if it cannot.
        buffers: as in :func:`read_folder`. A sharded buffer follows from the configuration and stays.

    Returns:
        Names that did not fit: ``missing_keys``, ``unexpected_keys``, ``mismatched_keys`` and :data:`UNTIED`.
    """
    sources, unexpected = _sources(twin, list(readers))
    mismatched = set()
    taken = _convert(twin, sources, readers, shapes, take)
    whole = {name: tuple(buffer.shape) for name, buffer in twin.named_buffers(remove_duplicate=False)}
    for name, made_of in sources.items():
        if name in buffers and not made_of.converted:
            stored = readers[made_of.keys[0]]()
            if _shape_of(stored) != whole[name]:
                mismatched.add(name)
            elif tuple(buffers[name].shape) == whole[name]:
                buffers[name].copy_(stored[...])
        if name not in shapes or made_of.converted:
            continue  # on another rank, or already converted
        stored = readers[made_of.keys[0]]()
        if not _shape_of(stored):  # stored here as a vector of one element
            stored = torch.as_tensor(stored[...]).reshape(1)
        fits = stored if _shape_of(stored) == shapes[name] else complete(name, stored)
        if fits is None:
            mismatched.add(name)
        else:
            take(name, fits)
            taken.add(name)
    done = {id(parameters[name]) for name in taken | mismatched}
    first_names = {id(parameter): name for name, parameter in list(parameters.items())[::-1]}
    missing = {name for key, name in first_names.items() if key not in done} | buffers.keys() - sources.keys()
    return {
        "missing_keys": missing,
        "unexpected_keys": unexpected,
        "mismatched_keys": mismatched,
        UNTIED: {
            name for name, tied in tied_sources(twin).items() if _differ(readers, sources.get(name), sources.get(tied))
        },
    }


def _differ(readers: Mapping[str, Callable[[], Any]], first: _Source | None, second: _Source | None) -> bool:
    """Whether both tensors of a tie are stored, with other values; it holds a few rows of each in memory."""
    if first is None or second is None or first.converted or second.converted:
        return False
    tensor, tied = readers[first.keys[0]](), readers[second.keys[0]]()
    shape = _shape_of(tensor)
    rows = range(0, shape[0], ROWS) if shape and shape == _shape_of(tied) else ()
    return any(not torch.equal(tensor[row : row + ROWS], tied[row : row + ROWS]) for row in rows)


def _new_rows(
    source: ModelConfig, twin: PreTrainedModel, seed: int | None, name: str, stored: Any
) -> torch.Tensor | None:
    wanted = tuple(twin.get_parameter(name).shape)
    if seed is None or not adds_rows(source, _shape_of(stored), wanted):
        return None
    return with_new_rows(twin, name, stored, seed)


def _shape_of(stored: Any) -> tuple[int, ...]:
    return tuple(stored.shape if isinstance(stored, torch.Tensor) else stored.get_shape())


def _checked_folder(source: ModelConfig) -> Path:
    if source.path is None:
        raise ConfigError("model.path", None, "give a Hugging Face model folder")
    folder = whole_folder(source.path)
    check_model_folder(folder)
    return folder


def _sources(twin: PreTrainedModel, keys: list[str]) -> tuple[dict[str, _Source], set[str]]:
    """Sources of the model's tensors, and unexpected tensors of the checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(twin) or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = twin.state_dict()
    sources: dict[str, _Source] = {}
    unexpected = set()
    for key in sorted(keys):
        name, pattern = rename_source_key(key, renamings, converters, twin.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unexpected.add(key)
            continue
        entry = sources.setdefault(name, _Source([], pattern is not None))
        entry.keys.append(key)
    return sources, unexpected


def _convert(
    twin: PreTrainedModel,
    sources: Mapping[str, _Source],
    readers: Mapping[str, Callable[[], Any]],
    shapes: Mapping[str, tuple[int, ...]],
    take: TakeTensor,
) -> set[str]:
    """Passes converted parameters to ``take``, one at a time; returns their names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    filled = set()
    for name, made_of in sources.items():
        if not made_of.converted or name not in shapes:
            continue
        tensors = {key: readers[key]() for key in made_of.keys}
        mapping: Any = get_model_conversion_mapping(twin)
        options = LoadStateDictConfig(weight_mapping=mapping, dtype=torch.float32, device_map={"": "cpu"})
        with _no_progress_bar():
            convert_and_load_state_dict_in_model(twin, tensors, options)
        for other, value in list(twin.named_parameters(remove_duplicate=False)):
            if value.is_meta:
                continue
            if tuple(value.shape) == shapes.get(other):
                take(other, value.detach())
                filled.add(other)
            module, _, attribute = other.rpartition(".")
            twin.get_submodule(module)._parameters[attribute] = torch.nn.Parameter(value.to("meta"))
    return filled


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
