"""``mgpu-pipe export``: a run's weights as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mgpu_pipe import __version__
from mgpu_pipe.commands import Verb
from mgpu_pipe.errors import EXIT_OK, BadInputError
from mgpu_pipe.inference.arguments import folder_of, parsed, parser_of, quiet, takes_target
from mgpu_pipe.inference.find import find
from mgpu_pipe.inference.load import open_model
from mgpu_pipe.inference.push import push_folder, push_target
from mgpu_pipe.models.fields import class_of, maker_of


def export(argv: Sequence[str]) -> int:
    """``mgpu-pipe export [FOLDER] --out FOLDER``: a Hugging Face folder, proved to load before it gets its name.

    With ``--push ORG/NAME`` it is put on the Hub, too.
    """
    parser = parser_of("export", "Write a Hugging Face model folder.")
    takes_target(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--merge", action="store_true", help="adapters are added to the weights beside them (the default)")
    how.add_argument("--adapter", action="store_true", help="write the adapters alone, as the peft package reads them")
    parser.add_argument("--push", metavar="ORG/NAME", help="put it on the Hugging Face Hub, with a model card")
    parser.add_argument("--private", action="store_true", help="make the repository of --push a private one")
    _export(parsed(parser, argv))
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.inference.export import check_target, export_folder

    folder, out = folder_of(arguments), arguments.out.expanduser()
    check_target(out, arguments.force)
    if arguments.private and arguments.push is None:
        raise BadInputError("--private: makes no sense without --push; leave it out")
    if arguments.push is not None and arguments.adapter:
        raise BadInputError("--push: takes whole models; use --merge in the place of --adapter")
    target = None if arguments.push is None else push_target(arguments.push)
    found = find(folder)
    quiet()
    from mgpu_pipe.inference.adapters import has_adapters

    run = open_model(found, arguments.frozen_weights, arguments.weights == "ema")
    of = "the average of " if arguments.weights == "ema" else ""
    option = "--adapter" if arguments.adapter else "--merge" if arguments.merge else None
    if option is not None and not has_adapters(run):
        raise BadInputError(f"{option}: {run.source} has no adapters; leave the option out")
    merges = has_adapters(run) and not arguments.adapter
    out = export_folder(run, out, arguments.dtype, arguments.force, arguments.max_shard_size, arguments.adapter)
    if arguments.adapter:
        print(f"exported the adapters of {run.source} to {out} ({arguments.dtype})")
        print(f'load it: peft.PeftModel.from_pretrained(base, "{out}"), where base is {run.maker or "its base model"}')
    else:
        what = "adapters merged; " if merges else ""
        print(f"exported {of}{run.source} to {out} ({arguments.dtype}; {what}logits compared after loading it again)")
        loader = maker_of(run.model.config.model_type, class_of([type(run.model).__name__]))
        print(f'load it: transformers.{loader}.from_pretrained("{out}")')
    if run.tokenizer_folder is None and "text" in run.model.input_modalities:
        print("no tokenizer was kept beside the weights; add the one it was trained with")
    if target is not None:
        from mgpu_pipe.inference.model_card import write_card

        write_card(run, out, target.repository, arguments.dtype)
        step = "" if run.step is None else f" of step {run.step}"
        address = push_folder(out, target, arguments.private, f"Model{step}, exported by mgpu_pipe {__version__}")
        print(f"pushed {out} to {address}")
        print(f"train on: mgpu-pipe model=hf model.path={target.repository}")


VERB = Verb("write a Hugging Face folder", export)
