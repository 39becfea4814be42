"""``mgpu-pipe retrieve``: how well an encoder finds documents, next to BM25, and with a reranker after both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import positive_int
from mgpu_pipe.errors import EXIT_OK, print_line
from mgpu_pipe.inference.batch.score_rows import require_reranker
from mgpu_pipe.inference.batch.settings import BATCH_SIZE, require_input
from mgpu_pipe.inference.batch.texts import vectors_of, width_of
from mgpu_pipe.inference.find_model import existing_folder, find_model
from mgpu_pipe.inference.model_arguments import (
    add_device_argument,
    build_parser,
    folder_of,
    open_run,
    parse_arguments,
    resolve_device,
)
from mgpu_pipe.models.weights.sentence_modules import require_cosine_or_dot
from mgpu_pipe.report.columns import print_columns
from mgpu_pipe.system.local_files import expand_home

CANDIDATES = 30


def retrieve(argv: Sequence[str]) -> int:
    """``mgpu-pipe retrieve [FOLDER] [--input FILE] [--reranker FOLDER]``: recall, MRR and NDCG of each search."""
    parser = build_parser("retrieve", "Compare an encoder's search with BM25's; order what both find by a reranker.")
    help_text = "rows of data=embedding_pairs; default: the pairs that the run held out"
    parser.add_argument("--input", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--reranker", type=Path, metavar="FOLDER", help="run of objective=reranker, or a CrossEncoder")
    help_text = f"documents of a query that the reranker scores; default {CANDIDATES}"
    parser.add_argument("--candidates", type=positive_int, default=CANDIDATES, metavar="N", help=help_text)
    help_text = f"texts in a forward pass; default {BATCH_SIZE}"
    parser.add_argument("--batch-size", type=positive_int, default=BATCH_SIZE, metavar="N", help=help_text)
    add_device_argument(parser)
    arguments = parse_arguments(parser, argv)
    source = find_model(folder_of(arguments))
    require_cosine_or_dot(vectors_of(source.config, source.folder), source.folder)
    width_of(source)
    second = None
    if arguments.reranker is not None:
        second = find_model(existing_folder(arguments.reranker))
        require_reranker(second)
    pairs = None if arguments.input is None else expand_home(arguments.input).absolute()
    if pairs is not None:
        require_input(pairs)
    from mgpu_pipe.inference.batch.compare_searches import METRICS, compare_searches
    from mgpu_pipe.inference.open import load_run

    run = open_run(arguments)
    reranker = None if second is None else load_run(second, resolve_device(arguments.device))
    batch, candidates = arguments.batch_size, arguments.candidates
    measured, queries, documents = compare_searches(run, source, pairs, reranker, candidates, batch)
    rows = [
        [name, f"{100 * recall:.1f}%", *(f"{value:.3f}" for value in others)] for name, (recall, *others) in measured
    ]
    print_columns(["search", *METRICS], rows, METRICS, below=())
    ranked = "" if reranker is None else f"; the reranker orders the first {candidates} of each"
    print_line(f"{queries:,} queries, {documents:,} documents{ranked}")
    return EXIT_OK


VERB = Verb("compare an encoder's search with BM25's and a reranker's", retrieve)
