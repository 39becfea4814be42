"""Arguments of the verbs that open a run or a model, and opening it; ``--device-map`` and its companions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mgpu_pipe.config.arguments import VerbParser, byte_size
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.device_map import AUTO, BALANCED, CPU, DISK, memory_limits, read_map_file
from mgpu_pipe.inference.find_model import existing_folder, find_model
from mgpu_pipe.inference.open import LoadedRun, load_run
from mgpu_pipe.runs.latest import named_or_newest, split_root
from mgpu_pipe.system.hardware import usable_gpus
from mgpu_pipe.system.local_files import exists, expand_home

FOLDER_HELP = (
    "run's, step's or Hugging Face model's folder; default: the newest run with a checkpoint below "
    "run.root=<folder> (outputs/)"
)


def build_parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = VerbParser(prog=f"mgpu-pipe {verb}", description=description)
    parser.add_argument("folder", nargs="?", type=Path, help=FOLDER_HELP)
    parser.add_argument(
        "--frozen-weights", type=Path, metavar="FOLDER", help="model folder whose weights the checkpoint leaves out"
    )
    parser.add_argument(
        "--weights", choices=["trained", "ema"], default="trained", help="ema: their average (optimizer.ema)"
    )
    return parser


def add_target_arguments(parser: argparse.ArgumentParser, dtypes: Sequence[str] = ("fp32", "bf16")) -> None:
    """Add the arguments of a verb that writes a model folder."""
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=dtypes, default="fp32", help="type of the weights")
    parser.add_argument("--max-shard-size", type=byte_size, metavar="SIZE", help="of a weight file; default 5GB")
    parser.add_argument("--force", action="store_true", help="replace an existing model folder")


def add_visual_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a verb that takes pictures, videos and recordings."""
    image_help = "a picture, for models that see; repeatable; <image> in the text marks its place, else it comes first"
    parser.add_argument("--image", action="append", type=Path, default=[], metavar="FILE", help=image_help)
    video_help = "a video, a file or a folder of frames, likewise; <video> in the text marks its place"
    parser.add_argument("--video", action="append", type=Path, default=[], metavar="FILE", help=video_help)
    audio_help = "a recording; <audio> in the text marks its place"
    parser.add_argument("--audio", action="append", type=Path, default=[], metavar="FILE", help=audio_help)


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument of a verb that runs the model."""
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="auto (cuda where there is a GPU), cpu, cuda, cuda:1, ..."
    )


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; a first one like ``data.x=1`` is an override and not the folder.

    Raises:
        BadInputError: a wrong argument.
    """
    words, root = split_root(argv)
    arguments = parser.parse_intermixed_args(words)  # overrides may follow options
    first = arguments.folder
    if first is not None and "overrides" in arguments and "=" in str(first) and not exists(first):
        arguments.overrides = [str(first), *arguments.overrides]
        arguments.folder = None
    arguments.root = root
    return arguments


def open_run(arguments: argparse.Namespace) -> LoadedRun:
    folder, device = find_inputs(arguments), resolve_device(arguments.device)
    source = find_model(folder)
    silence_transformers()
    return load_run(source, device, arguments.frozen_weights, arguments.weights == "ema")


def folder_of(arguments: argparse.Namespace) -> Path:
    """The named folder, else the newest run's; found before slow imports."""
    folder = named_or_newest(arguments.folder, arguments.root, saved=True)
    arguments.folder, arguments.root = (
        existing_folder(folder),
        None,
    )  # so that a second call neither searches nor prints again
    return Path(arguments.folder)


def find_inputs(arguments: argparse.Namespace) -> Path:
    """The folder of :func:`folder_of`; BadInputError if it, a picture, a video or a recording is not there."""
    folder = folder_of(arguments)
    for option, what in (("image", "picture"), ("video", "video"), ("audio", "recording")):
        for file in getattr(arguments, option, ()):
            if not exists(expand_home(file)):
                raise BadInputError(f"--{option}={file}: no such file or folder; give another {what}")
    return folder


def resolve_device(wanted: str) -> str:
    """The device that ``--device`` names, checked without torch."""
    gpus = usable_gpus()
    if wanted == "auto":
        return "cuda" if gpus else "cpu"
    name = re.fullmatch(r"cpu|(?:cuda|gpu)(?::(\d+))?", wanted)
    if name is None:
        raise BadInputError(f"--device={wanted}: no such device; use auto, cpu, cuda or cuda:<number>")
    if wanted != "cpu" and int(name[1] or 0) >= gpus:
        has = f"has {gpus} GPU{'s' if gpus > 1 else ''} to use" if gpus else "can use no GPU here"
        raise BadInputError(f"--device={wanted}: torch {has}; use auto or cpu")
    return wanted.replace("gpu", "cuda")


def silence_transformers() -> None:
    """Turn off progress bars and advice of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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
    for option in ("input", "image", "video", "audio", "frozen_weights"):
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
