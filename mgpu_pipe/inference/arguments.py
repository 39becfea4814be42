"""What the verbs that open a run or a model share: their arguments, and opening it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.arguments import VerbParser, byte_size
from mgpu_pipe.config.hardware import usable_gpus
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.find import existing_folder, find
from mgpu_pipe.inference.load import LoadedRun, load_run
from mgpu_pipe.runs.newest import named_or_newest, split_root

FOLDER_HELP = (
    "run's, step's or Hugging Face model's folder; default: the newest run with a checkpoint below "
    "run.root=<folder> (outputs/)"
)


def parser_of(verb: str, description: str) -> argparse.ArgumentParser:
    parser = VerbParser(prog=f"mgpu-pipe {verb}", description=description)
    parser.add_argument("folder", nargs="?", type=Path, help=FOLDER_HELP)
    parser.add_argument(
        "--frozen-weights", type=Path, metavar="FOLDER", help="model folder whose weights the checkpoint leaves out"
    )
    parser.add_argument(
        "--weights", choices=["trained", "ema"], default="trained", help="ema: their average (optimizer.ema)"
    )
    return parser


def takes_target(parser: argparse.ArgumentParser) -> None:
    """The arguments of a verb that writes a model folder."""
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="type of the weights")
    parser.add_argument("--max-shard-size", type=byte_size, metavar="SIZE", help="of a weight file; default 5GB")
    parser.add_argument("--force", action="store_true", help="replace an existing model folder")


def takes_images(parser: argparse.ArgumentParser) -> None:
    """The arguments of a verb that shows the model pictures and videos."""
    told = "a picture, for models that see; repeatable; <image> in the text says where, else it stands in front"
    parser.add_argument("--image", action="append", type=Path, default=[], metavar="FILE", help=told)
    told = "a video, a file or a folder of frames, likewise; <video> in the text says where"
    parser.add_argument("--video", action="append", type=Path, default=[], metavar="FILE", help=told)


def takes_device(parser: argparse.ArgumentParser) -> None:
    """The argument of a verb that runs the model."""
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="auto (cuda where there is a GPU), cpu, cuda, cuda:1, ..."
    )


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse; a first argument like ``data.x=1`` is taken for an override, not for the folder.

    Raises:
        BadInputError: a wrong argument.
    """
    words, root = split_root(argv)
    parsed = parser.parse_args(words)
    first = parsed.folder
    if first is not None and "overrides" in parsed and "=" in str(first) and not first.exists():
        parsed.overrides = [str(first), *parsed.overrides]
        parsed.folder = None
    parsed.root = root
    return parsed


def open_run(arguments: argparse.Namespace) -> LoadedRun:
    folder, device = folder_of(arguments), device_of(arguments.device)
    found = find(folder)
    quiet()
    return load_run(found, device, arguments.frozen_weights, arguments.weights == "ema")


def folder_of(arguments: argparse.Namespace) -> Path:
    """The folder that is named, else the newest run's; looked for before anything slow is imported."""
    folder = named_or_newest(arguments.folder, arguments.root, saved=True)
    return existing_folder(folder)


def device_of(wanted: str) -> str:
    """The device that ``--device`` names, judged without torch."""
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


def quiet() -> None:
    """No progress bars or advice from transformers among this program's own output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
