"""``mgpu-pipe import``: another program's weights as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.commands import Verb
from mgpu_pipe.config.arguments import VerbParser
from mgpu_pipe.errors import EXIT_OK, BadInputError
from mgpu_pipe.inference.arguments import quiet, takes_target
from mgpu_pipe.runs.hub_names import at_commits


def import_weights(argv: Sequence[str]) -> int:
    """``mgpu-pipe import --from PATH --out FOLDER model=... [model.KEY=VALUE ...]``: a Hugging Face folder."""
    parser = VerbParser(
        prog="mgpu-pipe import",
        description="Write another program's weights (a Lightning or torch file, a DeepSpeed ZeRO folder) as a Hugging "
        "Face folder, for model.path, checkpoint.init_from and every other program.",
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
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer to put beside the weights")
    parser.add_argument("--trust", action="store_true", help="run the code that a DeepSpeed folder's pickles bring")
    takes_target(parser)
    _import(parser.parse_args(argv))
    return EXIT_OK


def _import(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.config.compose import compose

    strange = [text for text in arguments.overrides if not text.lstrip("+").startswith(("model.", "model="))]
    if strange:
        raise BadInputError(f"{strange[0]}: import takes model overrides only, e.g. model=llama_tiny")
    if not arguments.overrides:
        raise BadInputError("import: say which model it is, e.g. model=llama_tiny, or model=hf model.path=<folder>")
    if arguments.tokenizer is not None and not arguments.tokenizer.is_dir():
        raise BadInputError(f"--tokenizer={arguments.tokenizer}: no such folder")
    model = at_commits(compose(arguments.overrides)[0]).model
    from mgpu_pipe.inference.export import check_target, export_folder, working_folder

    out, source = arguments.out.expanduser(), arguments.source.expanduser()
    if not source.exists():
        raise BadInputError(f"--from={arguments.source}: nothing is there; correct the path")
    check_target(out, arguments.force)
    quiet()
    from mgpu_pipe.inference.external_weights import read_weights
    from mgpu_pipe.inference.importing import fill_from_external

    with working_folder(out, ".import") as scratch:
        weights = read_weights(source, arguments.trust, scratch)
        stored = fill_from_external(model, weights, source, arguments.prefix, arguments.ignore, arguments.tokenizer)
        export_folder(stored, out, arguments.dtype, arguments.force, arguments.max_shard_size)
    print(f"imported {source} to {out} ({len(weights)} tensors, {arguments.dtype}; logits compared)")
    print(f"train on: mgpu-pipe model=hf model.path={out}")


VERB = Verb("read another program's weights", import_weights, section="model")
