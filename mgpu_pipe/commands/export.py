"""``mgpu-pipe export``: a run's weights as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mgpu_pipe.commands import Verb
from mgpu_pipe.errors import EXIT_OK
from mgpu_pipe.inference.arguments import folder_of, parsed, parser_of, quiet, takes_target
from mgpu_pipe.inference.load import open_model
from mgpu_pipe.models.fields import class_of


def export(argv: Sequence[str]) -> int:
    """``mgpu-pipe export [FOLDER] --out FOLDER``: a Hugging Face folder, proved to load before it gets its name."""
    parser = parser_of("export", "Write a Hugging Face model folder.")
    takes_target(parser)
    _export(parsed(parser, argv))
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.inference.export import check_target, export_folder

    folder, out = folder_of(arguments), arguments.out.expanduser()
    check_target(out, arguments.force)
    quiet()
    run = open_model(folder, arguments.frozen_weights)
    out = export_folder(run, out, arguments.dtype, arguments.force, arguments.max_shard_size)
    print(f"exported {run.source} to {out} ({arguments.dtype}; logits compared after loading it again)")
    print(f'load it: transformers.{class_of([type(run.model).__name__])}.from_pretrained("{out}")')
    if run.tokenizer_folder is None:
        print("no tokenizer was kept beside the weights; add the one it was trained with")


VERB = Verb("write a Hugging Face folder", export)
