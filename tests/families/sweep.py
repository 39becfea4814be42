"""The table of families and variants: ``python -m tests.families.sweep``; goes on where it stopped.

A cell is ``equal`` (with its worst error over the bound), ``refused`` (by the line that a user gets before the start),
or ``untried`` (with the reason). ``wrong`` and ``crash`` are what must not be.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that this process had would be missed by those forked from it

import torch
import torch._dynamo
import torch.distributed as dist

from mgpu_pipe.architectures.find import stages_of
from mgpu_pipe.checks.preflight import preflight_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import model_types
from tests.families.cells import Variant, not_tried, small, variants
from tests.families.stages import STAGES, stages_error
from tests.families.step import (
    compute_in,
    error,
    isolates,
    one_document_at_a_time,
    single,
    tensor_parallel,
    values_of,
    whole_model,
)
from tests.support.filling import assembled
from tests.support.processes import run_processes

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "families.json"
Cell = dict[str, Any]
STRATEGIES = {
    "single": (1, ["strategy=single"]),
    "tp": (2, ["strategy=tp", "strategy.tp=2"]),
    "pp": (2, ["strategy=pp", "strategy.pp=2", "data.micro_batch_size=1"]),
}
"""Processes, and what is typed for them."""
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
AXES = {"single": "one process", "tp": "tp=2", "pp": "pp=2", "compile": "compiled"}
BAD = ("wrong", "crash")
NEAR = 30.0
LIMIT_S = 600.0
"""For a family."""


@lru_cache(maxsize=8)
def _composed(strategy: str, packing: str) -> RunConfig:
    words = [
        "data.source=synthetic",
        "data.seq_len=24",
        "data.global_batch_size=2",
        f"trainer.devices={STRATEGIES[strategy][0]}",
        "trainer.accelerator=cpu",
        "trainer.max_steps=1",
        f"data.packing={packing}",
    ]
    return compose([*words, *STRATEGIES[strategy][1]])[0]


def refusal(model: ModelConfig, strategy: str, packing: str) -> str | None:
    """The first line with which the run that a cell stands for is refused before it starts."""
    errors = preflight_errors(replace(_composed(strategy, packing), model=model))
    return str(errors[0]) if errors else None


def family_cells(models: dict[str, ModelConfig], compiled: bool) -> dict[str, Cell]:
    """The cells of a family's small models, on the two ranks of a world; the first computes what one process can."""
    return {
        name: _cell(model, compiles=compiled and number == 0) for number, (name, model) in enumerate(models.items())
    }


def _cell(model: ModelConfig, compiles: bool) -> Cell:
    found: Any = None
    goes_on = [False]
    if dist.get_rank() == 0:
        found = _on_one_process(model, compiles)
        goes_on = [found[1] is not None]
    dist.broadcast_object_list(goes_on)
    dtype = torch.float32
    while goes_on[0]:
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, _on_this_rank(model, dtype))
        if found is not None:
            expected = found[1] if dtype is torch.float32 else one_document_at_a_time(model, found[2], dtype)
            found[0]["tp"] = _together(ranks, expected, found[2])
            goes_on = [near(found[0]["tp"]) and dtype is torch.float32]
        dist.broadcast_object_list(goes_on)
        dtype = torch.float64
    return {} if found is None else dict(found[0])


def _on_one_process(model: ModelConfig, compiles: bool) -> tuple[Cell, Any, Any]:
    """The cell as far as one process knows it, and what two have to give: None where there is nothing to try."""
    isolated = isolates(model)
    packing = "best_fit" if isolated else "none"
    cell: Cell = {"packs": isolated}
    said = refusal(model, "single", packing)
    if said is not None:
        return {**cell, "single": {"is": "refused", "why": said}}, None, None
    try:
        whole = whole_model(model)
        expected = one_document_at_a_time(model, values_of(whole))
        if expected["sees_the_future"]:
            return {**cell, "single": {"is": "wrong", "why": "a token sees those after it"}}, None, None
        cell["single"] = _judged({way: error(result, expected) for way, result in single(model, whole).items()})
        if near(cell["single"]):
            values = {name: value.clone() for name, value in values_of(whole).items()}
            exact = one_document_at_a_time(model, values, torch.float64)
            compute_in(whole, torch.float64)
            results = single(model, whole)
            cell["single"] = _judged({way: error(result, exact) for way, result in results.items()}, "float64")
    except Exception as failure:
        return {**cell, "single": _told("crash", failure)}, None, None
    if compiles:
        cell["compile"] = _compiled(model, expected, packing)
    said = refusal(model, "tp", packing)
    if said is not None:
        return {**cell, "tp": {"is": "refused", "why": said}}, None, None
    return cell, expected, {name: value.float() for name, value in values_of(whole).items()}


def _compiled(model: ModelConfig, expected: Any, packing: str) -> Cell:
    said = refusal(replace(model, compile=True), "single", packing)
    if said is not None:
        return {"is": "refused", "why": said}
    try:
        torch._dynamo.reset()
        found = single(model, whole_model(model), compiled=True)
        return _judged({f"compiled, {way}": error(result, expected) for way, result in found.items()})
    except Exception as failure:
        return _told("crash", failure)


def near(cell: Cell) -> bool:
    """Whether an error is so little over the bound that it may be what fp32 rounds: then fp64 tells."""
    return cell["is"] == "wrong" and cell.get("error", NEAR) < NEAR


def _on_this_rank(model: ModelConfig, dtype: torch.dtype) -> Any:
    """Loss and pieces of gradients, or the cell that says what went wrong."""
    try:
        return tensor_parallel(model, values_of(whole_model(model)), dtype)
    except Exception as failure:
        return _told("crash", failure)


def _together(ranks: list[Any], expected: Any, values: Any) -> Cell:
    for one in ranks:
        if isinstance(one, dict):
            return one
    pieces = [piece for _, found in ranks for piece in found]
    values = {name: values[name] for name in {piece[0] for piece in pieces} | set(expected["gradients"])}
    try:
        return _judged({"tp": error((ranks[0][0], assembled(pieces, values)), expected)})
    except Exception as failure:
        return _told("wrong", failure)


def _judged(errors: dict[str, tuple[float, str]], computed_in: str = "float32") -> Cell:
    way, (worst, where) = max(errors.items(), key=lambda entry: entry[1][0])
    found = {"error": float(f"{worst:.2g}"), **({"in": computed_in} if computed_in != "float32" else {})}
    return {"is": "equal", **found} if worst < 1 else {"is": "wrong", **found, "why": f"{where} ({way})"}


def _told(kind: str, failure: Exception) -> Cell:
    said = " ".join(str(failure).split())[:240]
    if isinstance(failure, (ConfigError, ConfigErrors)):
        return {"is": kind, "why": f"refused late: {said}" if kind == "crash" else said}
    where = traceback.extract_tb(failure.__traceback__)[-1]
    return {"is": kind, "why": f"{type(failure).__name__}: {said} ({Path(where.filename).name}:{where.lineno})"}


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of libraries; as before when left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def try_family(family: str, first: int | None = None, compiled: bool = False, context: Any = None) -> dict[str, Cell]:
    """The cells of a family's variants, or of the ``first`` few."""
    reason = not_tried(family)
    if reason is not None:
        return {"as shipped": {"single": {"is": "untried", "why": reason}}}
    return cells_of(variants(family)[:first], compiled, context)


def cells_of(chosen: list[Variant], compiled: bool = False, context: Any = None) -> dict[str, Cell]:
    """The cells of variants of one family.

    Args:
        compiled: try the first one under torch.compile too.
        context: of :mod:`multiprocessing`, which starts the ranks; the tests' server's if not given.
    """
    models: dict[str, ModelConfig] = {}
    cells: dict[str, Cell] = {}
    for variant in chosen:
        try:
            models[variant.name] = small(variant)
            build_meta(models[variant.name])  # imports the family's code, once for both ranks
        except Exception as failure:
            said = refusal(models[variant.name], "single", "none") if variant.name in models else None
            cells[variant.name] = {"single": {"is": "refused", "why": said} if said else _told("untried", failure)}
            models.pop(variant.name, None)
    if models:
        try:
            ranks = 2 if any(refusal(model, "tp", "none") is None for model in models.values()) else 1
            cells.update(run_processes(ranks, family_cells, models, compiled, timeout_s=LIMIT_S, context=context)[0])
        except AssertionError as failure:
            cells.update({name: {"single": {"is": "crash", "why": str(failure)[-300:]}} for name in models})
    for variant in chosen:
        if stages_of(variant.family) is not None and cells[variant.name]["single"]["is"] == "equal":
            cells[variant.name]["pp"] = in_stages(variant)
    return cells


def in_stages(variant: Variant) -> Cell:
    """The cell of the variant's pipeline: its stages one after the other in this process."""
    try:
        model = small(variant, stages=STAGES)
        said = refusal(model, "pp", "best_fit" if isolates(model) else "none")
        return {"is": "refused", "why": said} if said else _judged({"pp": stages_error(model)})
    except Exception as failure:
        refused = isinstance(failure, ConfigError) and failure.key == "model.type"
        return _told("untried" if refused else "crash", failure)


def write(place: Path, table: dict[str, Any]) -> None:
    """The table with its versions, one line a cell, so that a change shows as what changed."""
    versions = {name: version(name) for name in ("torch", "transformers", "mgpu_pipe")}
    families = ",\n".join(
        f"  {json.dumps(family)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(cell)}" for name, cell in cells.items())
        + "\n  }"
        for family, cells in sorted(table.items())
    )
    place.write_text(
        f'{{\n "versions": {json.dumps(versions)},\n "families": {{\n{families}\n }}\n}}\n', encoding="utf-8"
    )


def page(table: dict[str, Any]) -> str:
    """The table by family, for a reader."""
    axes = [axis for axis in AXES if any(axis in cell for cells in table.values() for cell in cells.values())]
    lines = [
        "# Model families",
        "",
        "Every causal language model of transformers, small, in up to 16 variants of its booleans, against plain",
        "transformers over one document at a time in one process: loss, gradient norm and every gradient. Written by",
        "`python -m tests.families.sweep`; cell by cell in `benchmarks/results/families.json`.",
        "",
        "`packs`: documents of one row are kept apart; where not, each has a row (`data.packing=auto`). A number alone",
        "says how many variants are equal; `refused` are told in one line before a run starts. `pp=2`: four stages one",
        "after the other in one process against the whole model; nothing where the family cannot be cut into stages.",
        "",
        f"| family | packs | {' | '.join(AXES[axis] for axis in axes)} |",
        f"|---|---|{'---|' * len(axes)}",
    ]
    for family, cells in sorted(table.items()):
        untried = {
            part["why"]
            for cell in cells.values()
            for part in cell.values()
            if isinstance(part, dict) and part["is"] == "untried"
        }
        if all(cell["single"]["is"] == "untried" for cell in cells.values()):
            lines.append(f"| {family} | | untried: {sorted(untried)[0]} |{' |' * (len(axes) - 1)}")
            continue
        packs = "yes" if any(cell.get("packs") for cell in cells.values()) else "no"
        lines.append(f"| {family} | {packs} | {' | '.join(_counted(cells, axis) for axis in axes)} |")
    return "\n".join(lines) + "\n"


def _counted(cells: dict[str, Cell], axis: str) -> str:
    kinds = Counter(cell[axis]["is"] for cell in cells.values() if axis in cell)
    equal = kinds.pop("equal", 0)
    return ", ".join([*([str(equal)] if equal else []), *(f"{count} {kind}" for kind, count in sorted(kinds.items()))])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--again", action="store_true", help="try families with wrong cells and crashes again")
    parser.add_argument("--compile", action="store_true", help="try a family's first variant under torch.compile")
    parser.add_argument("--stages", action="store_true", help="try pipelines alone, of cells that are there")
    parser.add_argument("--first", type=int, help="try so many variants of each family")
    parser.add_argument("families", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with quiet():
        fill_in(arguments)


def fill_in(arguments: argparse.Namespace) -> None:
    """Try what the command line asks for, and write the table after each family."""
    table: dict[str, Any] = {}
    if arguments.table.exists():
        table = json.loads(arguments.table.read_text(encoding="utf-8"))["families"]
    for family in arguments.families or (table if arguments.stages else model_types()):
        if arguments.stages:
            if stages_of(family) is None:
                continue
            cells = {variant.name: variant for variant in variants(family)}
            for name, cell in table[family].items():
                if cell["single"]["is"] == "equal":
                    cell["pp"] = in_stages(cells[name])
                    print(f"{family} [{name}] pp: {cell['pp']}", flush=True)
            continue
        bad = any(
            part["is"] in BAD
            for cell in table.get(family, {}).values()
            for part in cell.values()
            if isinstance(part, dict)
        )
        if family in table and not (bad and arguments.again) and not arguments.families:
            continue
        table[family] = try_family(family, arguments.first, arguments.compile, multiprocessing.get_context("fork"))
        write(arguments.table, table)
        if arguments.table == TABLE:
            PAGE.write_text(page(table), encoding="utf-8")
        for name, cell in table[family].items():
            for axis in AXES:
                if axis in cell:
                    print(
                        f"{family} [{name}] {axis}: {cell[axis]['is']} {cell[axis].get('error', '')} "
                        f"{cell[axis].get('why', '')}",
                        flush=True,
                    )
    if arguments.stages:
        write(arguments.table, table)
    if arguments.stages and arguments.table == TABLE:
        PAGE.write_text(page(table), encoding="utf-8")


if __name__ == "__main__":
    main()
