"""Maps the parts of a model to GPUs, the host's memory and the disk, by their bytes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mgpu_pipe.config.arguments import byte_size
from mgpu_pipe.errors import BadInputError, ConfigErrors, one_line
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, parse_yaml, read_bytes

CPU, DISK = "cpu", "disk"
AUTO, BALANCED = "auto", "balanced"
GPU = re.compile(r"(?:cuda:|gpu:)?(\d{1,4})", re.ASCII)
DEVICES_HELP = "use cpu, disk, or a GPU's number"


@dataclass(frozen=True)
class Part:
    """Modules that lie on one device: a block, or modules outside of blocks; several where they share weights.

    Attributes:
        modules: their names.
        nbytes: of their weights, each counted once.
    """

    modules: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class DeviceMap:
    """The device of each part of a model: ``cuda:<number>``, ``cpu`` or ``disk``."""

    parts: tuple[Part, ...]
    devices: tuple[str, ...]

    @property
    def main_device(self) -> str:
        """The device that computes what lies on the disk, and where there is a GPU also what lies on the host."""
        return min((device for device in self.devices if device not in (CPU, DISK)), key=_gpu_number, default=CPU)

    def nbytes(self, device: str) -> int:
        """Bytes of the weights on ``device``."""
        return sum(part.nbytes for part, place in zip(self.parts, self.devices, strict=True) if place == device)

    def devices_by_module(self) -> dict[str, str]:
        """The device of each module that a part names."""
        return {
            module: device for part, device in zip(self.parts, self.devices, strict=True) for module in part.modules
        }

    def table(self, limits: Mapping[str, int]) -> list[str]:
        """Lines of a table: the bytes on each device, its limit, and its first and last module."""
        rows = [("device", "weights", "limit", "parts")]
        devices = [*limits, *(device for device in dict.fromkeys(self.devices) if device not in limits)]
        for device in devices:
            names = [module for module, place in self.devices_by_module().items() if place == device]
            parts = f"{len(names)}: {names[0]} ... {names[-1]}" if names else "0"
            limit = f"{limits[device]:,}" if device in limits else "-"
            rows.append((device, f"{self.nbytes(device):,}", limit, parts))
        rows.append(("total", f"{sum(part.nbytes for part in self.parts):,}", "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return [
            f"{device:{widths[0]}}  {nbytes:>{widths[1]}}  {limit:>{widths[2]}}  {parts}".rstrip()
            for device, nbytes, limit, parts in rows
        ]


def memory_limits(text: str) -> dict[str, int]:
    """The limits of ``0=20GiB,cpu=64GiB``: bytes by device, GPUs first.

    Raises:
        argparse.ArgumentTypeError: an entry has no such form, or names a device twice.
    """
    limits: dict[str, int] = {}
    for entry in text.split(","):
        name, _, size = entry.partition("=")
        device = device_name(name.strip())
        if device is None or device == DISK or device in limits or not size:
            raise argparse.ArgumentTypeError(f"{entry}: write each GPU's number or cpu once, such as 0=20GiB,cpu=64GiB")
        limits[device] = byte_size(size)
    gpus = sorted((device for device in limits if device != CPU), key=_gpu_number)
    return {device: limits[device] for device in (*gpus, *({CPU} & limits.keys()))}


def device_name(text: object) -> str | None:
    """``cpu``, ``disk`` or ``cuda:<number>`` for ``cuda:1``, ``gpu:1`` or ``1``; None for other texts."""
    if text in (CPU, DISK):
        return str(text)
    gpu = None if isinstance(text, bool) else GPU.fullmatch(str(text))
    return None if gpu is None else f"cuda:{int(gpu[1])}"


def _gpu_number(device: str) -> int:
    return int(device.partition(":")[2])


def plan_map(parts: Sequence[Part], limits: Mapping[str, int], is_balanced: bool) -> DeviceMap:
    """The GPUs in their order, then the host, then the disk; a part goes to the first device with room.

    The device that computes parts of the host or the disk keeps room for the largest of them.

    Args:
        limits: bytes of weights for each device, GPUs first.
        is_balanced: whether GPUs that hold the whole model get nearly equal bytes.

    Raises:
        BadInputError: that device does not even hold the largest part.
    """
    main = next(iter(limits))
    computing = [device for device in limits if device != CPU] or [CPU]
    reserve = 0
    while True:
        devices = _fill(parts, {**limits, main: limits[main] - reserve})
        waiting = [part for part, device in zip(parts, devices, strict=True) if device not in computing]
        largest = max(waiting, key=lambda part: part.nbytes, default=Part((), 0))
        if largest.nbytes > limits[main]:
            raise BadInputError(
                f"--max-memory: {main} has {limits[main]:,} bytes for weights, and {largest.modules[0]} alone takes "
                f"{largest.nbytes:,}; give it more"
            )
        if largest.nbytes <= reserve:
            break
        reserve = largest.nbytes
    if is_balanced and not waiting and len(computing) > 1:
        devices = _balance(parts, {device: limits[device] for device in computing})
    return DeviceMap(tuple(parts), tuple(devices))


def _fill(parts: Sequence[Part], limits: Mapping[str, int]) -> list[str]:
    """The device of each part. Devices follow each other in the order of parts, aside from parts for the disk."""
    room, names, position = dict(limits), list(limits), 0
    devices = []
    for part in parts:
        fitting = [index for index in range(position, len(names)) if part.nbytes <= room[names[index]]]
        if not fitting:
            devices.append(DISK)
            continue
        position = fitting[0]
        room[names[position]] -= part.nbytes
        devices.append(names[position])
    return devices


def _balance(parts: Sequence[Part], limits: Mapping[str, int]) -> list[str]:
    """Devices such that the fullest holds as little as consecutive parts allow; the ``limits`` hold all parts."""
    low, high = 0, max(limits.values())
    while low < high:  # the smallest limit for all that holds every part
        middle = (low + high) // 2
        if DISK in _fill(parts, {device: min(limit, middle) for device, limit in limits.items()}):
            low = middle + 1
        else:
            high = middle
    return _fill(parts, {device: min(limit, high) for device, limit in limits.items()})


def read_map_file(file: Path) -> dict[str, str]:
    """Devices by module of a JSON or YAML file.

    Raises:
        BadInputError: the file is missing or holds no such mapping.
        ConfigErrors: it names unknown devices.
    """
    try:
        content = parse_yaml(read_bytes(file, MAX_CONFIG_BYTES))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadInputError(f"--device-map={file}: cannot be read as YAML ({one_line(error)}); correct it") from error
    if not isinstance(content, dict) or not content or not all(isinstance(name, str) for name in content):
        raise BadInputError(f"--device-map={file}: maps no modules to devices; write lines such as model.layers.0: cpu")
    devices = {name: device_name(device) for name, device in content.items()}
    unknown = [name for name, device in devices.items() if device is None]
    if unknown:
        raise ConfigErrors(
            [BadInputError(f"{file}: {name}: {content[name]}: no such device; {DEVICES_HELP}") for name in unknown]
        )
    return {name: device for name, device in devices.items() if device is not None}


def map_by_file(parts: Sequence[Part], entries: Mapping[str, str], names: Collection[str], file: Path) -> DeviceMap:
    """Each part on the device of the entry that names it, or the nearest module around it.

    Args:
        entries: of :func:`read_map_file`.
        names: all modules of the model.

    Raises:
        ConfigErrors: entries name no modules or cut a block, parts have no entry, or weights that modules share
            have two devices.
    """
    inside = {name: module for part in parts for module in part.modules for name in names if _is_in(name, module)}
    problems = [f"{name}: the model has no such module; correct it" for name in entries if name not in names]
    problems += [
        f"{name}: cuts {inside[name]}, which runs on one device; name that" for name in entries if name in inside
    ]
    devices = []
    for part in parts:
        places = [_entry_around(module, entries) for module in part.modules]
        without = [module for module, place in zip(part.modules, places, strict=True) if place is None]
        problems += [f"{module}: has weights and no device; add it" for module in without]
        if len(set(places)) > 1 and not without:
            problems.append(f"{' and '.join(part.modules)}: share weights; give them one device")
        devices.append(places[0] or CPU)
    if problems:
        raise ConfigErrors([BadInputError(f"{file}: {problem}") for problem in problems])
    return DeviceMap(tuple(parts), tuple(devices))


def _is_in(name: str, module: str) -> bool:
    """Whether the module ``name`` is a true part of ``module``."""
    return name.startswith(f"{module}.")


def _entry_around(module: str, entries: Mapping[str, str]) -> str | None:
    around = [name for name in entries if name in ("", module) or _is_in(module, name)]
    return entries[max(around, key=len)] if around else None
