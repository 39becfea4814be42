"""Opens a model whose parts lie on several GPUs, in the host's memory and on the disk, by accelerate's hooks.

Each weight is read from its file and goes to its place; the whole model is never in memory.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.inference.device_map import BALANCED, CPU, DISK, DeviceMap, Part, map_by_file, plan_map
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.inference.model_arguments import MapSettings
from mgpu_pipe.inference.open import LoadedRun, no_average, open_model, with_buffers
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.shard_units import decoder_blocks
from mgpu_pipe.models.weights.folder import stored_tensors
from mgpu_pipe.models.weights.pretrained import limit_modules, stored_buffers
from mgpu_pipe.models.weights.slices import TakeTensor, read_folder
from mgpu_pipe.system.hardware import available_memory, host_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE = 0.9
"""Share of free memory for weights where no limit is given; activations and the key-value cache get the rest."""


def print_map(source: ModelSource, settings: MapSettings, average: bool) -> None:
    """Print the table of bytes; reads no weights, and the devices need not exist."""
    limits = _limits(settings)
    for line in _map(_open(source, average)[0].model, settings, limits).table(limits):
        print_line(line)


@contextmanager
def open_placed_run(source: ModelSource, settings: MapSettings, average: bool) -> Iterator[LoadedRun]:
    """Context with the model on its devices; at its end the offloaded weights are removed.

    Prints the table of bytes to standard error.

    Args:
        average: whether to take the average of the weights (``optimizer.ema``).

    Raises:
        BadInputError: the folder, its map or its offload folder cannot be used.
    """
    limits = _limits(settings)
    run, read_all = _open(source, average)
    device_map = _map(run.model, settings, limits)
    for line in device_map.table(limits):
        print_line(line, file=sys.stderr)
    with _offload_folder(settings, device_map.nbytes(DISK)) as folder:
        _place(run.model, device_map, folder, read_all)
        yield run


def _open(source: ModelSource, average: bool) -> tuple[LoadedRun, Callable[[TakeTensor], None]]:
    """The run with its model on the meta device, and a function that passes on each weight; or BadInputError."""
    if source.config is not None:
        if CheckpointReader(source.folder).left_out is not None:
            raise BadInputError(
                f"--device-map: {source.folder} leaves out its frozen weights; export it, and generate with the export"
            )
        stored = open_model(source, average=average)

        def read_step(take: TakeTensor) -> None:
            for name, parameter in stored.model.named_parameters():
                take(name, stored.read(name, parameter.dtype))

        return LoadedRun(
            stored.model, stored.source, stored.tokenizer_folder, stored.config, stored.step, stored.is_trusted
        ), read_step
    if average:
        raise no_average(source.folder)
    model_config = ModelConfig(name=source.folder.name, path=str(source.folder))
    with limit_modules(stored_tensors(source.folder)):
        model = with_buffers(build_meta(model_config))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}

    def read_files(take: TakeTensor) -> None:
        read_folder(model_config, parameters, shapes, take, type(model).__name__, buffers=stored_buffers(model))

    return LoadedRun(model, source.folder, source.tokenizer, None, None), read_files


def _limits(settings: MapSettings) -> dict[str, int]:
    """Bytes of weights by device, GPUs first; empty for a map of the user's, which has no limits."""
    if settings.entries is not None or settings.limits is not None:
        return dict(settings.limits or {})
    gpus = {f"cuda:{number}": torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())}
    return {device: int(SHARE * free) for device, free in {**gpus, CPU: min(available_memory(), host_memory())}.items()}


def _map(model: PreTrainedModel, settings: MapSettings, limits: Mapping[str, int]) -> DeviceMap:
    parts = model_parts(model)
    if settings.entries is None:
        return plan_map(parts, limits, settings.choice == BALANCED)
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    return map_by_file(parts, settings.entries, names, Path(settings.choice))


def model_parts(model: PreTrainedModel) -> list[Part]:
    """The blocks of ``model`` and its modules with weights outside of blocks, in their order.

    Raises:
        BadInputError: a module around the blocks has weights.
    """
    blocks = {id(block) for block in decoder_blocks(model)}
    groups: list[tuple[list[str], dict[int, int]]] = []
    """Names of modules, and the bytes of their parameters by identity."""

    def visit(name: str, module: nn.Module) -> None:
        if id(module) not in blocks and not any(True for _ in module.parameters(recurse=False)):
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child)
            return
        if id(module) not in blocks and any(id(part) in blocks for part in module.modules()):
            raise BadInputError(f"--device-map: {type(model).__name__} has weights around its blocks; leave it out")
        names, sizes = [name], {id(value): value.numel() * value.element_size() for value in module.parameters()}
        if not sizes:
            return
        sharing = [group for group in groups if group[1].keys() & sizes.keys()]
        for group in sharing[1:]:
            groups.remove(group)
        for group in reversed(sharing):
            names, sizes = group[0] + names, {**group[1], **sizes}
        if sharing:
            groups[groups.index(sharing[0])] = (names, sizes)
        else:
            groups.append((names, sizes))

    visit("", model)
    return [Part(tuple(names), sum(sizes.values())) for names, sizes in groups]


@contextmanager
def _offload_folder(settings: MapSettings, nbytes: int) -> Iterator[Path | None]:
    """Context with the folder for ``nbytes`` of weights, removed with them; BadInputError if it cannot be used."""
    folder = settings.offload_folder
    if not nbytes:
        yield None
        return
    if folder is None:
        raise BadInputError(
            f"--device-map={settings.choice}: {nbytes:,} bytes of weights go to the disk; "
            "add --offload-folder FOLDER, or raise --max-memory"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise BadInputError(f"--offload-folder={folder}: {error.strerror}; choose another folder") from error
    if not is_empty:
        raise BadInputError(f"--offload-folder={folder}: is not empty; choose a new folder")
    try:
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise BadInputError(
                f"--offload-folder={folder}: has {free:,} bytes free of {nbytes:,}; choose another disk"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(
    model: PreTrainedModel, device_map: DeviceMap, folder: Path | None, read_all: Callable[[TakeTensor], None]
) -> None:
    """Fill the meta ``model`` on the devices of ``device_map`` and attach the hooks that move inputs and weights."""
    from accelerate import dispatch_model
    from accelerate.utils import offload_weight, save_offload_index

    devices = device_map.devices_by_module()
    places: dict[int, str] = {}
    aliases: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for module_name, device in devices.items():
        places.update(dict.fromkeys(map(id, model.get_submodule(module_name).parameters()), device))
    for name, parameter in parameters.items():
        aliases.setdefault(id(parameter), []).append(name)
    index: dict[str, Any] = {}

    @torch.no_grad()
    def take(name: str, stored: Any) -> None:
        meta = parameters[name]
        value = stored[...].to(meta.dtype).reshape(meta.shape)
        names = aliases[id(meta)]
        if places[id(meta)] == DISK:
            assert folder is not None
            offload_weight(value, names[0], folder, index)
            for other in names[1:]:
                (folder / f"{other}.dat").symlink_to(f"{names[0]}.dat")
                index[other] = index[names[0]]
            return
        filled = nn.Parameter(value.to(places[id(meta)]), requires_grad=False)
        for alias in names:
            module, _, attribute = alias.rpartition(".")
            model.get_submodule(module)._parameters[attribute] = filled

    read_all(take)
    if folder is not None:
        save_offload_index(index, str(folder))
    main = device_map.main_device
    for name, module in model.named_modules():  # modules with buffers alone, such as rotary tables
        if not module._buffers or any(f"{name}.".startswith(f"{part}.") for part in devices):
            continue
        module._buffers.update(
            {key: value if value is None else value.to(main) for key, value in module._buffers.items()}
        )
        if not any(True for _ in module.children()):
            devices[name] = main
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns of every offloaded weight
    compound = {type(model.get_submodule(name)) for name in devices if any(model.get_submodule(name).children())}
    dispatch_model(
        model,
        {name: _accelerate_name(device) for name, device in devices.items()},
        main_device=_accelerate_name(main),  # not a torch.device: it compares with "cpu"
        offload_dir=folder,
        preload_module_classes=[kind.__name__ for kind in compound],  # they may use weights without a module's forward
    )


def _accelerate_name(device: str) -> str | int:
    return device if device in (CPU, DISK) else int(device.partition(":")[2])
