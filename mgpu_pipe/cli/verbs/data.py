"""``mgpu-pipe data``: prints the training data as the model sees it, without training."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser, positive_int
from mgpu_pipe.errors import EXIT_OK, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from mgpu_pipe.config.hydra.compose import Composition
    from mgpu_pipe.config.schema import DataConfig, ObjectiveConfig, RunConfig
    from mgpu_pipe.data.order import Order
    from mgpu_pipe.data.samples import Prepared, SampleSet
    from mgpu_pipe.data.text.mixed_samples import PreparedMixture
    from mgpu_pipe.data.text.preview import Part
    from mgpu_pipe.topology import BatchPlan

DESCRIPTION = (
    "Prepare the data of a configuration and show it: how much there is, how long\n"
    "the documents are, and the first samples of the run. What the loss counts is\n"
    "green on a terminal, and stands between \u00bb and \u00ab elsewhere. Trains nothing.\n"
    "--samples N shows N of them (default 3)."
)
SHOWN_CLASSES = 20
BARS, WIDTH = 10, 40
"""Rows of the histogram, and columns of its longest bar."""
LABEL_WIDTH = 32
"""Characters for a bar's range and count."""


def data(words: list[str]) -> int:
    from mgpu_pipe.launch.compositions import check_composition, compose_and_run

    parser = VerbParser(prog="mgpu-pipe data", add_help=False, allow_abbrev=False)
    parser.add_argument("--samples", type=positive_int, default=3)
    options, rest = parser.parse_known_args(words)

    def job(composition: Composition) -> int:
        _show(check_composition(composition, elsewhere=True, trains=False), options.samples)
        return EXIT_OK

    return compose_and_run("data", DESCRIPTION, rest, job)


def _show(config: RunConfig, count: int) -> None:
    import numpy as np

    from mgpu_pipe.config.objective import description
    from mgpu_pipe.data.text.mixed_samples import PreparedMixture
    from mgpu_pipe.data.text.preview import lengths_of, parts_of
    from mgpu_pipe.launch.preparing import prepare_data
    from mgpu_pipe.objectives.registry import objective_class
    from mgpu_pipe.report.columns import print_rows
    from mgpu_pipe.topology import BatchPlan, ParallelDims

    prepared = prepare_data(config)
    objective = objective_class(config.objective.name)
    samples = objective.samples(prepared.complete(config), prepared.open(config, "train"))
    lengths = lengths_of(prepared)
    rows = _amounts(config.data, config.objective, prepared, samples, None if lengths is None else lengths[0])
    order = prepared.order(config.seed, config.data, len(samples))
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    print_rows([*rows, *_balance(config.objective, samples, order, plan)], "data")
    if isinstance(prepared, PreparedMixture):
        print_rows(_sources(prepared), "sources")
    if lengths is not None:
        print_rows(_histogram(lengths[0]), f"tokens a {lengths[1]}")
    indices, numbers = order.indices(0, count), np.arange(count)
    if lengths is None:
        for number, rows in enumerate(_fields(samples, indices, numbers)):
            print_rows(rows, f"sample {number}")
        return
    causal = description(config.objective.name).attention == "causal"
    for number, parts in enumerate(parts_of(prepared, samples, indices, numbers, causal)):
        print_rows([], f"sample {number}{_source_suffix(prepared, indices[number])}")
        print(_render(parts))  # print, because colours mark the trained text


def _amounts(
    data: DataConfig, objective: ObjectiveConfig, prepared: Prepared, samples: SampleSet, lengths: NDArray | None
) -> list[tuple[str, str]]:
    import numpy as np

    from mgpu_pipe.config.objective import description
    from mgpu_pipe.data.text.preview import places_of_pictures, uncounted_of

    every = np.arange(min(len(samples), 100_000))
    positions, padding = samples.positions(every), samples.padding(every)
    units = samples.valid_units(every, every)
    counts = description(objective.name).counts
    heldout, size = f"{prepared.validation_samples:,} held out for an evaluation", data.global_batch_size
    rows = [
        ("source", data.source),
        ("amount", ", ".join(f"{number:,} {what}" for number, what in prepared.amounts())),
        ("samples", f"{prepared.train_samples:,} to train on, {heldout}"),
        ("an epoch", f"{len(samples) / size:,.1f} steps of {size} samples"),
    ]
    if classes := getattr(prepared, "classes", ()):
        named = ", ".join(f"{number} {name}" for number, name in enumerate(classes[:SHOWN_CLASSES]))
        rows.append(("classes", named + (", ..." if len(classes) > SHOWN_CLASSES else "")))
    if positions:
        share = f"{100 * units / max(positions - padding, 1):.1f} for every 100 positions that hold something"
        rows.append(("loss", f"{units:,} {counts} in {len(every):,} samples, {share}"))
        rows.append(("padding", f"{100 * padding / positions:.1f}% of the positions"))
    if pictures := places_of_pictures(prepared):
        rows.append(
            ("pictures", f"{pictures[0]:,} pictures and videos take {pictures[1]:,} of the conversations' tokens")
        )
    if prepared.on_too_long:
        rows.append(("too long", prepared.too_long(data) or f"none (data.on_too_long={data.on_too_long})"))
    if lengths is not None:
        span = f"{int(lengths.min()):,} to {int(lengths.max()):,} tokens"
        if without := uncounted_of(prepared):
            rows.append(("no loss", f"{without:,} documents: they are empty, or nothing in them is trained"))
        rows.append(("lengths", f"{span}, mean {lengths.mean():,.0f}"))
    return rows


def _balance(objective: ObjectiveConfig, samples: SampleSet, order: Order, plan: BatchPlan) -> list[tuple[str, str]]:
    """Load imbalance of the processes in the first steps, with and without balancing by cost."""
    from mgpu_pipe.data.samples import MEASURED_STEPS, describe_imbalance, imbalances

    ratios = imbalances(samples, order, plan)
    if ratios is None:
        return []
    what = describe_imbalance(objective, plan)
    text = f"{what}, {MEASURED_STEPS} steps: {ratios[0]:.3f}; with data.balance=cost {ratios[1]:.3f}"
    return [("balance", text)]


def _sources(prepared: PreparedMixture) -> list[tuple[str, str]]:
    """Share, size and epochs of each source of a mixture."""
    from mgpu_pipe.data.sources.mixture import SLOTS

    return [
        (
            name,
            f"{100 * slots / SLOTS:g}% of the samples; {part.train_samples:,} samples of {part.num_tokens:,} tokens, "
            f"{prepared.train_samples * slots / SLOTS / part.train_samples:.2f} times an epoch",
        )
        for (name, slots), part in zip(prepared.slots.items(), prepared.parts, strict=True)
    ]


def _source_suffix(prepared: Prepared, index: int) -> str:
    from mgpu_pipe.data.text.mixed_samples import PreparedMixture

    return f", of {prepared.source_of(index)}" if isinstance(prepared, PreparedMixture) else ""


def _histogram(lengths: NDArray) -> list[tuple[str, str]]:
    import numpy as np

    # The longest 1% share a bar: one book would hide the spread of the others.
    usual = int(np.percentile(lengths, 99))
    edges = np.unique([*np.linspace(int(lengths.min()), usual + 1, BARS + 1).astype(int), int(lengths.max()) + 1])
    counts, _ = np.histogram(lengths, bins=edges)
    longest = max(10, min(WIDTH, shutil.get_terminal_size().columns - LABEL_WIDTH))
    block = "\u2588" if (sys.stdout.encoding or "").lower() == "utf-8" else "#"
    return [
        (
            f"{low:>7,} - {high - 1:,}",
            f"{block * -(-longest * int(number) // int(counts.max()))} {int(number):,}".strip(),
        )
        for number, low, high in zip(counts, edges[:-1], edges[1:], strict=True)
    ]


def _fields(samples: SampleSet, indices: NDArray, numbers: NDArray) -> list[list[tuple[str, str]]]:
    """Type, shape and value range of each field of samples that are not text."""
    batch = samples.batch(indices, numbers)

    def describe(value: Tensor, row: int) -> str:
        kind, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape[1:])
        return f"{kind} {shape}, {float(value[row].min()):g} to {float(value[row].max()):g}"

    return [[(name, describe(value, row)) for name, value in batch.items()] for row in range(len(indices))]


def _render(parts: list[Part]) -> str:
    terminal, text = sys.stdout.isatty(), ""
    for number, part in enumerate(parts):
        if part.begins and number:
            text += "\n\u2500\u2500\n"
        described = printable(part.text)
        marked = f"\x1b[32m{described}\x1b[0m" if terminal else f"\u00bb{described}\u00ab"
        text += marked if part.trained else described
    return text + "\n"


VERB = Verb("show the data as the model sees it", data, composes=True)
