"""``mgpu-pipe mine``: hard negatives for a file of pairs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import count, non_negative, positive_int
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_line
from mgpu_pipe.inference.batch.settings import BATCH_SIZE, require_input
from mgpu_pipe.inference.batch.texts import vectors_of, width_of
from mgpu_pipe.inference.find_model import find_model
from mgpu_pipe.inference.model_arguments import add_device_argument, build_parser, folder_of, open_run, parse_arguments
from mgpu_pipe.models.weights.sentence_modules import require_cosine_or_dot
from mgpu_pipe.system.local_files import exists, expand_home

NEGATIVES = 4


def mine(argv: Sequence[str]) -> int:
    """``mgpu-pipe mine [FOLDER] --input FILE --output FILE``: the rows with the documents nearest to each query."""
    parser = build_parser("mine", "Add hard negatives to pairs: documents near a query that are not its positives.")
    help_text = "rows of data=embedding_pairs: columns query, positive, negative; default: the run's training pairs"
    parser.add_argument("--input", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the same rows, JSON Lines (.jsonl)")
    help_text = f"new ones of a query, at most; default {NEGATIVES}"
    parser.add_argument("--negatives", type=positive_int, default=NEGATIVES, metavar="N", help=help_text)
    help_text = "leave out documents whose score is above that of the query's lowest positive less M"
    parser.add_argument("--margin", type=non_negative, metavar="M", help=help_text)
    help_text = "leave out the N nearest of the others too"
    parser.add_argument("--skip-top", type=count, default=0, metavar="N", help=help_text)
    parser.add_argument(
        "--batch-size", type=positive_int, default=BATCH_SIZE, metavar="N", help=f"default {BATCH_SIZE}"
    )
    add_device_argument(parser)
    arguments = parse_arguments(parser, argv)
    pairs = None if arguments.input is None else expand_home(arguments.input).absolute()
    out = expand_home(arguments.output).absolute()
    if out.suffix != ".jsonl":
        raise BadInputError(f"--output={arguments.output}: unknown ending; let it end in .jsonl")
    if exists(out):
        raise BadInputError(f"--output={arguments.output}: exists already; choose another name")
    if not out.parent.is_dir():
        raise BadInputError(f"--output={arguments.output}: there is no folder {out.parent}; make it")
    source = find_model(folder_of(arguments))
    require_cosine_or_dot(vectors_of(source.config, source.folder), source.folder)
    width_of(source)
    if pairs is not None:
        require_input(pairs)
    from mgpu_pipe.inference.batch.mine_negatives import MiningRules, mine_file

    started, rules = time.monotonic(), MiningRules(arguments.negatives, arguments.margin, arguments.skip_top)
    mined = mine_file(open_run(arguments), source, pairs, out, rules, arguments.batch_size)
    short = f"{mined.short:,} rows have fewer than {rules.negatives}; " if mined.short else ""
    seconds = f"{time.monotonic() - started:.1f} s"
    line = f"{mined.negatives:,} negatives for {mined.rows:,} rows in {out}; {short}{seconds}"
    print_line(line, file=sys.stderr, flush=True)
    return EXIT_OK


VERB = Verb("add hard negatives to pairs of query and document", mine)
