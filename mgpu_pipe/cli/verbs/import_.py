"""``mgpu-pipe import``: another program's weights as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser
from mgpu_pipe.data.text.tokenizer_folder import check_tokenizer
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_line
from mgpu_pipe.inference.find_model import tokenizer_folder
from mgpu_pipe.inference.model_arguments import add_target_arguments, silence_transformers
from mgpu_pipe.runs.hub_names import pin
from mgpu_pipe.system.local_files import exists, expand_home, is_folder


def import_weights(argv: Sequence[str]) -> int:
    """``mgpu-pipe import --from PATH --out FOLDER model=... [model.KEY=VALUE ...]``: a Hugging Face folder.

    A GGUF file names its model and brings its tokenizer.
    """
    parser = VerbParser(
        prog="mgpu-pipe import",
        description="Write another program's weights (a Lightning or torch file, a DeepSpeed ZeRO folder, a GGUF file) "
        "as a Hugging Face folder, for model.path, checkpoint.init_from and every other program.",
    )
    parser.add_argument("--from", dest="source", required=True, type=Path, metavar="PATH", help="checkpoint to read")
    parser.add_argument("overrides", nargs="*", metavar="model.KEY=VALUE", help="the model that was trained")
    parser.add_argument("--prefix", default="", help="what stands before the model's own names, e.g. model.")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tensors to leave out, e.g. 'metric.*'; repeatable",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer; default: that of model.path")
    parser.add_argument("--trust", action="store_true", help="run the code that a DeepSpeed folder's pickles bring")
    add_target_arguments(parser)
    _import(parser.parse_args(argv))
    return EXIT_OK


def _import(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.inference.gguf.file import is_gguf

    source = expand_home(arguments.source)
    if not exists(source):
        raise BadInputError(f"--from={arguments.source}: no such file or folder; check the path")
    if is_gguf(source):
        _import_gguf(arguments)
        return
    from mgpu_pipe.config.hydra.compose import compose

    strange = [text for text in arguments.overrides if not text.lstrip("+").startswith(("model.", "model="))]
    if strange:
        raise BadInputError(f"{strange[0]}: import takes model overrides only, e.g. model=llama_tiny")
    if not arguments.overrides:
        raise BadInputError("import: name the model, e.g. model=llama_tiny, or model=hf model.path=<folder>")
    if arguments.tokenizer is not None and not is_folder(arguments.tokenizer):
        raise BadInputError(f"--tokenizer={arguments.tokenizer}: no such folder; check the path")
    if arguments.tokenizer is not None:
        check_tokenizer(arguments.tokenizer)
    model = pin(compose(arguments.overrides)[0]).require().model
    from mgpu_pipe.inference.export_folder import check_target, export_folder, working_folder
    from mgpu_pipe.inference.import_weights import weight_files

    out = expand_home(arguments.out)
    check_target(out, arguments.force)
    weight_files(source, arguments.trust)
    silence_transformers()
    from mgpu_pipe.inference.import_weights import fill_from_external, read_weights

    with working_folder(out, ".import") as scratch:
        weights = read_weights(source, arguments.trust, scratch)
        stored = fill_from_external(model, weights, source, arguments.prefix, arguments.ignore, arguments.tokenizer)
        if stored.tokenizer_folder is None and stored.maker is not None:
            stored.tokenizer_folder = tokenizer_folder(stored.maker)
        export_folder(stored, out, arguments.dtype, arguments.force, arguments.max_shard_size)
    print_line(f"imported {source} to {out} ({len(weights)} tensors, {arguments.dtype}; logits compared)")
    print_line(f"train on: mgpu-pipe model=hf model.path={out}")


def _import_gguf(arguments: argparse.Namespace) -> None:
    """Import a GGUF file, which takes no further options."""
    from mgpu_pipe.inference.export_folder import check_target, export_folder, working_folder
    from mgpu_pipe.inference.gguf.file import require_package

    unusable = {"--prefix": arguments.prefix, "--ignore": arguments.ignore, "--tokenizer": arguments.tokenizer}
    for option, value in {**unusable, "model overrides": arguments.overrides}.items():
        if value:
            raise BadInputError(f"{option}: a GGUF file names its model and brings its tokenizer; leave them out")
    out, source = expand_home(arguments.out), expand_home(arguments.source)
    check_target(out, arguments.force)
    require_package(f"--from={arguments.source}")
    silence_transformers()
    from mgpu_pipe.inference.import_weights import open_gguf

    with working_folder(out, ".import") as scratch:
        stored = open_gguf(source, scratch)
        export_folder(stored, out, arguments.dtype, arguments.force, arguments.max_shard_size)
    model = stored.model.config.model_type
    print_line(f"imported {source} to {out} ({model} with its tokenizer, {arguments.dtype}; logits compared)")
    print_line(f"train on: mgpu-pipe model=hf model.path={out}")


VERB = Verb("read another program's weights", import_weights, section="model")
