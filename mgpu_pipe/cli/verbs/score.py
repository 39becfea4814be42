"""``mgpu-pipe score``: a reranker's scores of the documents of each query."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.cli.processes import add_job_arguments, job_processes, job_settings
from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.batch.score_rows import count_rows, require_reranker
from mgpu_pipe.inference.batch.settings import BATCH_SIZE, ScoreSettings, require_input
from mgpu_pipe.inference.find_model import find_model
from mgpu_pipe.inference.model_arguments import build_parser, folder_of, parse_arguments
from mgpu_pipe.system.local_files import expand_home


def score(argv: Sequence[str]) -> int:
    """``mgpu-pipe score [FOLDER] --input FILE --output FILE``: the rows with a column ``scores``."""
    parser = build_parser("score", "Score the documents of each query by a reranker.")
    help_text = "rows of a query and its documents, or of data=embedding_pairs"
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help=help_text)
    help_text = "the same rows with a column scores, JSON Lines (.jsonl)"
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=help_text)
    add_job_arguments(parser, "score", f"pairs in a forward pass; default {BATCH_SIZE}")
    arguments = parse_arguments(parser, argv)
    if arguments.output.suffix != ".jsonl":
        raise BadInputError(f"--output={arguments.output}: unknown ending; let it end in .jsonl")
    config = job_processes("score", arguments)
    source, rows = find_model(folder_of(arguments)), expand_home(arguments.input).absolute()
    require_reranker(source)
    require_input(rows)
    settings = ScoreSettings(**job_settings(arguments, source, config.trainer), rows=count_rows(rows))
    from mgpu_pipe.launch.batch_job import run_job

    return run_job(settings, source, config)


VERB = Verb("score the documents of queries by a reranker", score)
