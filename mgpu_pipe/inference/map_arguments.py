"""Arguments that place a model's parts on devices: ``--device-map`` and its companions."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.device_map import AUTO, BALANCED, CPU, DISK, memory_limits, read_map_file
from mgpu_pipe.system.hardware import usable_gpus
from mgpu_pipe.system.local_files import expand_home


@dataclass(frozen=True)
class MapSettings:
    """Devices for the parts of a model.

    Attributes:
        choice: ``auto``, ``balanced``, or the file that ``entries`` come from.
        entries: devices by module; None for a planned map.
        limits: bytes of weights by device, GPUs first; None takes this machine's free memory.
        offload_folder: for weights on the disk, a folder that does not exist yet or is empty.
    """

    choice: str
    entries: Mapping[str, str] | None
    limits: Mapping[str, int] | None
    offload_folder: Path | None


def add_map_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a verb that places a model's parts on several devices."""
    parser.add_argument(
        "--device-map", metavar="MAP", help="auto, balanced or a file: place parts on GPUs, host and disk"
    )
    parser.add_argument(
        "--max-memory", type=memory_limits, metavar="SIZES", help="with --device-map, such as 0=20GiB,cpu=64GiB"
    )
    parser.add_argument("--offload-folder", type=Path, metavar="FOLDER", help="with --device-map, for the disk's part")
    parser.add_argument("--print", action="store_true", help="with --device-map: print its bytes, and load nothing")


def read_map_arguments(arguments: argparse.Namespace) -> MapSettings | None:
    """The settings that the arguments give; None without ``--device-map``. Needs no torch.

    Raises:
        BadInputError: options that do not go together, a bad file, missing GPUs, or accelerate is not installed.
    """
    choice = arguments.device_map
    if choice is None:
        for option in ("max_memory", "offload_folder", "print"):
            if getattr(arguments, option):
                name = f"--{option.replace('_', '-')}"
                raise BadInputError(f"{name}: is for --device-map; leave it out, or add --device-map auto")
        return None
    for option in ("input", "image", "video", "frozen_weights"):
        if getattr(arguments, option):
            name = f"--{option.replace('_', '-')}"
            raise BadInputError(f"--device-map={choice}: does not work with {name}; leave one of them out")
    if arguments.device != "auto":
        fix = "leave --device out, or limit the map by --max-memory cpu=SIZE"
        raise BadInputError(f"--device={arguments.device}: --device-map={choice} chooses the devices; {fix}")
    entries = None
    if choice not in (AUTO, BALANCED):
        file = expand_home(choice)
        if not file.is_file():
            raise BadInputError(f"--device-map={choice}: no such file; use auto, balanced, or a JSON or YAML file")
        entries = read_map_file(file)
        if arguments.max_memory is not None:
            raise BadInputError(f"--max-memory: {choice} names the device of each module; leave one of them out")
    if not arguments.print:
        _require_accelerate()
        _require_gpus(arguments.max_memory or () if entries is None else entries.values())
    folder = arguments.offload_folder
    return MapSettings(
        choice, entries, arguments.max_memory, None if folder is None else expand_home(folder).absolute()
    )


def _require_accelerate() -> None:
    if find_spec("accelerate") is None:
        raise BadInputError("--device-map: needs the package accelerate; pip install 'mgpu_pipe[accelerate]'")


def _require_gpus(devices: Collection[str]) -> None:
    gpus = {CPU, DISK, *(f"cuda:{number}" for number in range(usable_gpus()))}
    for device in devices:
        if device not in gpus:
            has = ", ".join(sorted(gpus - {DISK}))
            raise BadInputError(f"--device-map: {device} is not here, only {has}; add --print to plan without it")
