"""``mgpu-pipe encode``: a file of texts becomes a file of vectors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.cli.processes import add_job_arguments, job_processes, job_settings
from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import positive_int
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.batch.settings import BATCH_SIZE, EncodeSettings, require_input
from mgpu_pipe.inference.batch.texts import count_texts, prompt_of, vectors_of, width_of
from mgpu_pipe.inference.find_model import find_model
from mgpu_pipe.inference.model_arguments import build_parser, folder_of, parse_arguments
from mgpu_pipe.system.local_files import expand_home

ENDINGS = (".parquet", ".npy")


def encode(argv: Sequence[str]) -> int:
    """``mgpu-pipe encode [FOLDER] --input FILE --output FILE``: the vector of each text, in the order of the input."""
    parser = build_parser("encode", "Write the vectors of texts.")
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE", help="JSON Lines, CSV, TSV, Parquet, or .txt of lines"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="vectors, .parquet or .npy")
    parser.add_argument("--column", default="text", metavar="NAME", help="of the texts; default text")
    parser.add_argument(
        "--prompt", metavar="KIND", help="prompt before every text: query, document, or another of the model's"
    )
    parser.add_argument("--size", type=positive_int, metavar="N", help="first numbers of each vector (Matryoshka)")
    add_job_arguments(parser, "encode", f"default {BATCH_SIZE}")
    return _encode(parse_arguments(parser, argv))


def _encode(arguments: argparse.Namespace) -> int:
    if arguments.output.suffix not in ENDINGS:
        raise BadInputError(f"--output={arguments.output}: unknown ending; let it end in {' or '.join(ENDINGS)}")
    config = job_processes("encode", arguments)
    source, texts = find_model(folder_of(arguments)), expand_home(arguments.input).absolute()
    vectors, width = vectors_of(source.config, source.folder), width_of(source)
    size = arguments.size or width
    if size > width:
        raise BadInputError(f"--size={size}: the model's vectors have {width} numbers; give at most that")
    prompt = prompt_of(vectors, arguments.prompt)
    require_input(texts)
    settings = EncodeSettings(
        **job_settings(arguments, source, config.trainer),
        column=arguments.column,
        prompt=prompt,
        size=size,
        rows=count_texts(texts, arguments.column, source.tokenizer, prompt),
    )
    from mgpu_pipe.launch.batch_job import run_job

    return run_job(settings, source, config)


VERB = Verb("write the vectors of texts", encode)
