"""``mgpu-pipe export``: a run's weights as a Hugging Face folder, a GGUF or ONNX file, or peft's adapters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe import __version__
from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, token_texts
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_line
from mgpu_pipe.inference.find_model import find_model
from mgpu_pipe.inference.gguf import FILE
from mgpu_pipe.inference.model_arguments import (
    add_target_arguments,
    build_parser,
    folder_of,
    parse_arguments,
    silence_transformers,
)
from mgpu_pipe.inference.model_card import makes_vectors, push_folder, push_target, write_card
from mgpu_pipe.inference.open import StoredModel, open_model
from mgpu_pipe.models.fields import builder_of, class_of
from mgpu_pipe.system.local_files import expand_home, is_file

if TYPE_CHECKING:
    from mgpu_pipe.inference.accuracy import Accuracy

DTYPES = ("fp32", "bf16", "fp16", "q8_0", "q4_k")


def export(argv: Sequence[str]) -> int:
    """``mgpu-pipe export [FOLDER] --out FOLDER [--format FORMAT]``: writes a folder, renamed once it is checked.

    ``--push ORG/NAME`` also uploads it to the Hub.
    """
    parser = build_parser("export", "Write a model folder for other programs.")
    add_target_arguments(parser, DTYPES)
    parser.add_argument(
        "--format",
        choices=["hf", "gguf", "onnx", "peft"],
        help="hf (the default), gguf for llama.cpp and Ollama, onnx for onnxruntime, peft for adapters alone",
    )
    parser.add_argument("--compare-dtypes", action="store_true", help="measure every type of a GGUF file")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--merge", action="store_true", help="add adapters to their weights (the default)")
    how.add_argument("--adapter", action="store_true", help="another word for --format peft")
    parser.add_argument("--push", metavar="ORG/NAME", help="put it on the Hugging Face Hub, with a model card")
    parser.add_argument("--private", action="store_true", help="make the repository of --push a private one")
    arguments = parse_arguments(parser, argv)
    _choose_format(arguments)
    {"gguf": _export_gguf, "onnx": _export_onnx}.get(arguments.format, _export_folder)(arguments)
    return EXIT_OK


def _choose_format(arguments: argparse.Namespace) -> None:
    """Set ``arguments.format`` from its synonyms; BadInputError where options contradict each other."""
    if arguments.adapter and arguments.format not in (None, "peft"):
        raise BadInputError(f"--adapter: means --format peft, and not {arguments.format}; leave one out")
    arguments.format = arguments.format or ("peft" if arguments.adapter else "hf")
    if arguments.merge and arguments.format == "peft":
        raise BadInputError("--merge: --format peft keeps adapters apart; leave one out")
    if arguments.format != "gguf" and arguments.dtype in ("q8_0", "q4_k"):
        raise BadInputError(f"--dtype={arguments.dtype}: is not written as {arguments.format}; add --format gguf")
    if arguments.format != "gguf" and arguments.compare_dtypes:
        raise BadInputError("--compare-dtypes: is for --format gguf; add it, or leave this out")
    if arguments.format == "onnx" and arguments.dtype == "bf16":
        raise BadInputError("--dtype=bf16: onnxruntime computes it on few devices; use --dtype fp32 or fp16")
    if arguments.private and arguments.push is None:
        raise BadInputError("--private: makes no sense without --push; leave it out")
    if arguments.push is not None and arguments.format == "peft":
        raise BadInputError("--push: takes whole models only; use --merge instead of --format peft")
    is_file = arguments.format in ("gguf", "onnx")
    if is_file and (arguments.push is not None or arguments.max_shard_size is not None):
        raise BadInputError(
            f"--format={arguments.format}: cuts no file and pushes none; leave out --push and --max-shard-size"
        )


def _export_gguf(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.inference.export_folder import check_target
    from mgpu_pipe.inference.gguf.file import require_package

    folder, out = folder_of(arguments), expand_home(arguments.out)
    check_target(out, arguments.force)
    require_package("--format=gguf")
    model_files = find_model(folder)
    silence_transformers()
    from mgpu_pipe.inference.export_gguf import export_gguf

    run = open_model(model_files, arguments.frozen_weights, arguments.weights == "ema")
    report = export_gguf(run, out, arguments.dtype, arguments.force, arguments.compare_dtypes)
    print_line(f"exported {run.source} to {out / FILE} ({arguments.dtype}, {report.nbytes / 1e6:.1f} MB)")
    readers = ", ".join(f"{reader} {difference:.0e}" for reader, difference in report.readers.items())
    print_line(f"logits read back, largest difference relative to the largest: {readers}")
    _print_accuracies(report.accuracies)
    if report.note:
        print_line(f"note: {report.note}")
    print_line(f"serve it: llama-server -m {out / FILE}, or ollama create my-model -f {out / 'Modelfile'}")


def _export_onnx(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.inference.export_folder import check_target
    from mgpu_pipe.inference.onnx import require_packages

    require_packages()
    folder, out = folder_of(arguments), expand_home(arguments.out)
    check_target(out, arguments.force)
    model_files = find_model(folder)
    silence_transformers()
    from mgpu_pipe.inference.export_onnx import export_onnx

    run = open_model(model_files, arguments.frozen_weights, arguments.weights == "ema")
    report = export_onnx(run, out, arguments.dtype, arguments.force)
    files = " and ".join(report.files)
    print_line(f"exported {run.source} to {out} ({arguments.dtype}; {files} compared by onnxruntime)")
    _print_accuracies(report.accuracies)
    print_line(f'load it: onnxruntime.InferenceSession("{out / report.files[0]}")')


def _print_accuracies(accuracies: Sequence[Accuracy]) -> None:
    """Print a table of size, perplexity and error by type."""
    print_line(f"{'dtype':<8}{'MB':>10}{'perplexity':>14}{'error of logits':>18}")
    for row in accuracies:
        perplexity = "-" if row.perplexity is None else f"{row.perplexity:.4f}"
        print_line(f"{row.dtype:<8}{row.nbytes / 1e6:>10.1f}{perplexity:>14}{row.error:>18.1e}")


def _export_folder(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.inference.export_folder import check_target, export_folder

    folder, out = folder_of(arguments), expand_home(arguments.out)
    check_target(out, arguments.force)
    target = None if arguments.push is None else push_target(arguments.push)
    model_files = find_model(folder)
    silence_transformers()
    from mgpu_pipe.inference.model_folder import has_adapters

    run = open_model(model_files, arguments.frozen_weights, arguments.weights == "ema")
    adapters_alone, adapts = arguments.format == "peft", has_adapters(run)
    if not adapts and (adapters_alone or arguments.merge):
        option = "--format peft" if adapters_alone else "--merge"
        raise BadInputError(f"{option}: {run.source} has no adapters; leave the option out")
    out = export_folder(run, out, arguments.dtype, arguments.force, arguments.max_shard_size, adapters_alone)
    if adapters_alone:
        print_line(f"exported the adapters of {run.source} to {out} ({arguments.dtype})")
        base = run.maker or "its base model"
        print_line(f'load it: peft.PeftModel.from_pretrained(base, "{out}"), where base is {base}')
    else:
        average = "the average of " if arguments.weights == "ema" else ""
        how = f"{arguments.dtype}; {'adapters merged; ' if adapts else ''}logits compared after loading it again"
        print_line(f"exported {average}{run.source} to {out} ({how})")
        print_line(f"load it: {_loader_call(run, out)}")
    _print_tokenizer_notes(run)
    if target is not None:
        write_card(run, out, target.repository, arguments.dtype, asks_hub=True)
        step = "" if run.step is None else f" of step {run.step}"
        address = push_folder(out, target, arguments.private, f"Model{step}, exported by mgpu_pipe {__version__}")
        print_line(f"pushed {out} to {address}")
        print_line(f"train on: mgpu-pipe model=hf model.path={target.repository}")


def _loader_call(run: StoredModel, out: Path) -> str:
    """Python that loads the model folder ``out``: by sentence-transformers where that library makes its vectors."""
    if makes_vectors(run, out):
        return f'sentence_transformers.SentenceTransformer("{out}")'
    loader = builder_of(run.model.config.model_type, class_of([type(run.model).__name__]))
    return f'transformers.{loader}.from_pretrained("{out}")'


def _print_tokenizer_notes(run: StoredModel) -> None:
    """Print a note where a model of texts has no tokenizer, or its tokenizer has more ids than it has rows."""
    if run.tokenizer_folder is not None:
        _print_ids_without_rows(run.tokenizer_folder, run.model.config)
        return
    # A speech encoder without a decoder names text among its inputs all the same.
    only_hears = run.model.main_input_name == "input_features" and not run.model.can_generate()
    if "text" in run.model.input_modalities and not only_hears:
        print_line("the run has no tokenizer; add the one that it was trained with")


def _print_ids_without_rows(tokenizer_folder: Path, config: Any) -> None:
    """Print a note about tokenizer ids beyond the model's vocabulary."""
    file, size = tokenizer_folder / TOKENIZER, getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int) or not is_file(file):
        return
    outside = {number: text for number, text in token_texts(file).items() if number >= size}
    if outside:
        first = min(outside)
        print_line(
            f"note: the tokenizer has {len(outside)} tokens that the model has no row for (its vocabulary has {size}), "
            f"the first is {first} ({outside[first]!r}); no text may hold them"
        )


VERB = Verb("write a folder for other programs", export)
