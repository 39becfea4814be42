"""A folder's safetensors weights into a model whose parameters are split: each rank reads its own parts.

Where a checkpoint's tensor is a parameter under the same or another name, the rank reads its rows alone. Where
transformers makes a parameter out of several tensors (the experts of a mixture, fused projections), that one parameter
is put together by transformers' own conversion and cut. So no rank holds more than its parts and one parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.compat.transformers_private import keys_not_expected
from mgpu_pipe.config.peft import PeftConfig
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.dora import MAGNITUDE
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.adapters.peft_folder import first_adapters, lengths, measures
from mgpu_pipe.models.adapters.qlora import pack, parameters_of, shapes_before
from mgpu_pipe.models.build import build_meta, materialise_empty
from mgpu_pipe.models.fields import class_of
from mgpu_pipe.models.folder import check_model_folder, weight_files
from mgpu_pipe.models.hub_folder import whole_folder
from mgpu_pipe.models.layout import Layout, layouts_of, unsharded_shape
from mgpu_pipe.models.new_rows import adds_rows, with_new_rows
from mgpu_pipe.models.parts import local_tensor, parts_held
from mgpu_pipe.models.pretrained import check_loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NO_ADAPTERS = PeftConfig()
TakeTensor = Callable[[str, Any], None]
"""Takes what it needs of the parameter of a name: of a whole tensor, or of a file's slice that reads what is asked."""


@dataclass(frozen=True)
class FolderWeights:
    """Fills a meta model with the weights of the folder ``source.path``.

    Attributes:
        seed, peft: as of :func:`read_folder`.
    """

    source: ModelConfig
    seed: int | None = None
    peft: PeftConfig = field(default_factory=PeftConfig)

    def __call__(self, model: PreTrainedModel, device: torch.device) -> None:
        fill_from_folder(model, self.source, device, self.seed, self.peft)


@dataclass(frozen=True)
class _Source:
    """What a parameter is made of: the checkpoint's names, and whether they are converted or merely renamed."""

    keys: list[str]
    converted: bool


@dataclass(frozen=True)
class _Target:
    """A parameter to fill, and where what this rank holds of it lies."""

    parameter: torch.nn.Parameter
    layout: Layout | None

    @property
    def whole(self) -> tuple[int, ...]:
        return unsharded_shape(self.parameter, self.layout)

    @torch.no_grad()
    def copy(self, stored: Any) -> None:
        """Take this rank's parts of ``stored``, a whole tensor or a slice of a file that reads what it is asked for."""
        local = local_tensor(self.parameter)
        for block, part in parts_held(self.parameter, self.layout):
            ranges = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))
            block.of(local).copy_(stored[ranges] if ranges else stored[...])


def _targets(model: torch.nn.Module) -> dict[str, _Target]:
    """The parameters that this rank has a part of, under every name that they have in the unsharded model."""
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
    """Fill the meta ``model`` (of ``source``, sharded or not) from the folder ``source.path``, in place.

    Args:
        seed, peft: as of :func:`read_folder`.

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

    read_folder(source, parameters, shapes, take, type(model).__name__, seed, peft)
    return model.train()


def read_folder(
    source: ModelConfig,
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    take: TakeTensor,
    architecture: str,
    seed: int | None = None,
    peft: PeftConfig = NO_ADAPTERS,
) -> None:
    """Show ``take`` every parameter of ``source`` in its folder, one after the other.

    Args:
        parameters: of the model, by all their names; those that are tied are one and the same.
        shapes: whole shapes, by the same names.
        architecture: the name of the model's class.
        seed: of tensors that the folder's own class does not have, a new head's; None: they are missing.
        peft: the model's adapters, which no folder holds.

    Raises:
        ModelFolderError: no or damaged weights, or tensors missing, unexpected or of other shapes.
    """
    from safetensors import safe_open

    folder = _checked_folder(source)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(str(folder / name), "pt")) for name in weight_files(folder)]
        readers = {key: partial(file.get_slice, key) for file in files for key in file.keys()}  # noqa: SIM118
        twin = build_meta(replace(source, freeze=[]), class_of([architecture]))
        add_adapters(twin, peft.unquantised())
        norms: dict[str, torch.Tensor] = {}
        stored_shapes = shapes_before(twin, shapes)

        def take_as_trained(name: str, stored: Any) -> None:
            layer, _, kind = name.rpartition(".")
            if parameters_of(name)[1] in shapes:
                for own in parameters_of(name):
                    take(own, pack(twin, own, stored[...].float()))
                return
            take(name, stored)
            if kind == "weight" and peft.init_from is not None and f"{layer}.{MAGNITUDE}" in parameters:
                norms[layer] = lengths(twin, layer, stored[...].float())

        complete = partial(_new_rows, source, twin, seed)
        known = {name: parameters[name] for name in stored_shapes}
        read = read_tensors(twin, readers, known, stored_shapes, take_as_trained, complete)
        for name, drawn in check_loading(source, read, twin, seed).items():
            take(name, drawn)
        trained = {name: tuple(p.shape) for name, p in twin.named_parameters() if p.requires_grad}
        for name, value in first_adapters(peft, trained):
            if name in parameters:
                layer = measures(name)
                take(name, value if layer is None else value - norms[layer])


def read_tensors(
    twin: PreTrainedModel,
    readers: Mapping[str, Callable[[], Any]],
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    take: TakeTensor,
    complete: Callable[[str, Any], torch.Tensor | None] = lambda name, stored: None,
) -> dict[str, set[str]]:
    """Show ``take`` every parameter that can be made of tensors under a folder's names, or the modules' own.

    Args:
        twin: the same model on the meta device, not split.
        readers: opens a tensor by its name: a whole one, or a slice of a safetensors file.
        parameters, shapes: as :func:`read_folder`'s.
        complete: makes a parameter of a tensor of another shape; None where it cannot.

    Returns:
        What did not find its place: ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys``.
    """
    sources, unexpected = _sources(twin, list(readers))
    mismatched = set()
    taken = _convert(twin, sources, readers, shapes, take)
    for name, made_of in sources.items():
        if name not in shapes or made_of.converted:
            continue  # a buffer; or done already
        stored = readers[made_of.keys[0]]()
        if not _shape_of(stored):  # held as a vector of one element
            stored = torch.as_tensor(stored[...]).reshape(1)
        fits = stored if _shape_of(stored) == shapes[name] else complete(name, stored)
        if fits is None:
            mismatched.add(name)
        else:
            take(name, fits)
            taken.add(name)
    done = {id(parameters[name]) for name in taken | mismatched}
    first_names = {id(parameter): name for name, parameter in list(parameters.items())[::-1]}
    missing = {name for key, name in first_names.items() if key not in done}
    return {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": mismatched}


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
    """For each of the model's tensors what it is made of, and the checkpoint's tensors that belong nowhere."""
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
    ignored = [re.compile(pattern) for pattern in keys_not_expected(twin)]
    return sources, {key for key in unexpected if not any(pattern.search(key) for pattern in ignored)}


def _convert(
    twin: PreTrainedModel,
    sources: Mapping[str, _Source],
    readers: Mapping[str, Callable[[], Any]],
    shapes: Mapping[str, tuple[int, ...]],
    take: TakeTensor,
) -> set[str]:
    """Show what transformers makes of several tensors, one parameter at a time; names of what came out."""
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

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
