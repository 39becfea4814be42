"""Writes a run's weights as ONNX files, and checks the files by onnxruntime before the final rename."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.inference.accuracy import Accuracy, Texts, held_out_texts
from mgpu_pipe.inference.check_onnx import perplexity
from mgpu_pipe.inference.export_folder import check_target, put_in_place, working_folder, write_files_beside
from mgpu_pipe.inference.model_card import write_card
from mgpu_pipe.inference.onnx import OnnxDtype
from mgpu_pipe.inference.onnx.graphs import Graph, graphs_of, kind_of
from mgpu_pipe.inference.open import StoredModel
from mgpu_pipe.inference.streamed_weights import PROBE_TOKENS, Inputs
from mgpu_pipe.models.field_sizes import usable_positions
from mgpu_pipe.models.fields import class_of
from mgpu_pipe.objectives.contrastive import caption_end_token
from mgpu_pipe.system.child_process import bind_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MAX_FILE_BYTES = 1_900_000_000
"""Weights of more bytes are written next to the file: a message of protobuf holds less than 2 GiB."""
TYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class OnnxReport:
    """Figures of a finished export.

    Attributes:
        files: names of the files.
        accuracies: of the run in fp32, and of the files.
    """

    files: tuple[str, ...]
    accuracies: tuple[Accuracy, Accuracy]


def export_onnx(stored: StoredModel, out: Path, dtype: OnnxDtype, force: bool = False) -> OnnxReport:
    """Write the folder ``out`` with ONNX files; an existing one stays until the new one is checked.

    This process holds the whole model. A fresh process runs the files by onnxruntime on padded batches and compares
    with what the run's model computes of each row alone.

    Args:
        force: replace an existing model folder.

    Raises:
        BadInputError: ``out`` must not be replaced, or such a model is not written as ONNX.
        MgpuError: a file does not give the same values, or cannot be written.
    """
    from mgpu_pipe.inference.model_folder import merge_stored
    from mgpu_pipe.models.weights.model_files import write_configuration

    check_target(out, force)
    kind_of(stored)
    stored = merge_stored(stored)
    with working_folder(out) as partial:
        check_target(out, force)
        try:
            model = _load(stored)
            nbytes = sum(parameter.nbytes for parameter in model.parameters())
            texts = held_out_texts(stored) if class_of([type(model).__name__]) == "AutoModelForCausalLM" else []
            of_run = Accuracy("run", nbytes, _perplexity(model, texts), 0.0)
            graphs = graphs_of(stored, model)
            cases = {graph.file: cases_of(graph, model) for graph in graphs}
            for graph in graphs:
                write_graph(graph, cases[graph.file][-1], TYPES[dtype], partial)
            error, of_texts = _check(partial, dtype, cases, texts)
            nbytes = sum(file.stat().st_size for file in partial.iterdir())
            write_configuration(stored.model, partial, TYPES[dtype], stored.maker)
            write_files_beside(stored, partial)
            write_card(stored, partial, out.name, dtype, "onnx")
            put_in_place(partial, out)
        except OSError as problem:
            raise MgpuError(f"--out={out}: writing failed ({problem}); free some space and try again") from problem
    return OnnxReport(tuple(cases), (of_run, Accuracy(dtype, nbytes, of_texts, error)))


def _load(stored: StoredModel) -> PreTrainedModel:
    """The whole model in fp32, in evaluation mode."""
    from mgpu_pipe.models.build import materialise_empty

    model = materialise_empty(stored.model, "cpu")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(stored.read(name, torch.float32))
    return model.eval()


@torch.no_grad()
def _perplexity(model: Any, texts: Texts) -> float | None:
    if not texts:
        return None
    arrays = [(ids.numpy(), labels.numpy()) for ids, labels in texts]
    return perplexity(lambda ids: model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy(), arrays)


def write_graph(graph: Graph, case: Case, dtype: torch.dtype, folder: Path) -> None:
    """Write the file of ``graph`` with weights of ``dtype``, large ones into a file next to it.

    Args:
        case: the batch by which the model is traced.

    Raises:
        BadInputError: torch.onnx cannot write the model.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    module = graph.module.eval()
    for parameter in module.parameters():  # buffers, such as frequencies of rotations, stay fp32
        parameter.data = parameter.data.to(dtype)
    sizes = {
        name: {i: size for i, size in enumerate(axes) if isinstance(size, str)} for name, axes in graph.axes.items()
    }
    try:
        program = _trace(module, case, sizes, graph.output)
    except torch.onnx.errors.OnnxExporterError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise BadInputError(f"--format=onnx: torch.onnx cannot write this model ({reason}); use --format hf") from error
    ClearMetadataAndDocStringPass()(program.model)  # lines of this machine's source, by operator
    program.model.metadata_props.update({name: str(value) for name, value in graph.facts.items()})
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    program.save(folder / graph.file, external_data=nbytes > MAX_FILE_BYTES)


def _trace(module: nn.Module, case: Case, sizes: dict[str, dict[int, str]], output: str) -> Any:
    """The traced program, without messages about the progress."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                module,
                kwargs=case.inputs,
                input_names=list(case.inputs),
                output_names=[output],
                dynamic_shapes=sizes,
                dynamo=True,
                verbose=False,
            )
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check(folder: Path, dtype: str, cases: dict[str, list[Case]], texts: Texts) -> tuple[float, float | None]:
    """Run the files in a fresh process; the largest difference and the perplexity of ``texts``."""
    from safetensors.torch import save

    done = subprocess.run(
        bind_command(python_module("mgpu_pipe.inference.check_onnx", str(folder.absolute()), dtype)),
        input=save(pack(cases, texts)),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        other = "; try --dtype fp32" if dtype != "fp32" else ""
        raise MgpuError(f"the ONNX files failed their check and were removed: {last}{other}")
    figures = json.loads(done.stdout.decode().splitlines()[-1])
    return figures["error"], figures["perplexity"]


@dataclass(frozen=True)
class Case:
    """A batch for a file.

    Attributes:
        inputs: of the file, padded.
        expected: what the run's model computes of each row without padding, fp32; NaN in places of padding.
    """

    inputs: Inputs
    expected: torch.Tensor


@torch.no_grad()
def cases_of(graph: Graph, model: Any) -> list[Case]:
    """Batches of one to three rows, of one place and of many; padded where the file takes a mask."""
    generator, longest = torch.Generator().manual_seed(0), _longest(model)
    batches = [[1], [longest], [max(1, longest // 3), longest, max(1, longest // 2)]]
    if not any(isinstance(size, str) for _, *sizes in graph.axes.values() for size in sizes):
        batches = [[0], [0, 0, 0]]
    elif "attention_mask" not in graph.axes:
        batches = [[max(2, longest // 3)] * 2, [longest] * 3]
    cases = []
    for lengths in batches:
        rows = [dict(_draw_row(graph, model.config, length, generator)) for length in lengths]
        cases.append(_case(graph, model, rows, False))
    if graph.pads_left:
        cases.append(_case(graph, model, rows, True))
    return cases


def _longest(model: Any) -> int:
    """Places of the longest row: tokens, or frames of sound."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if model.main_input_name == "input_values" or not positions:
        return PROBE_TOKENS
    return min(PROBE_TOKENS, usable_positions(positions, config.pad_token_id, config.model_type))


def _draw_row(graph: Graph, config: Any, length: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the inputs of one row, of ``length`` places, without its mask."""
    for name, (_, *sizes) in graph.axes.items():
        if name == "input_ids":
            ids = torch.randint(0, _vocabulary(config), (1, length), generator=generator)
            ids[ids == _padding(config)] = (_padding(config) + 1) % _vocabulary(config)
            if hasattr(config, "text_config") and not graph.by_place:
                ids[0, -1] = caption_end_token(config)
            yield name, ids
        elif name == "token_type_ids":
            yield name, (torch.arange(length) > length // 2).long()[None]
        elif name == "input_values":
            samples = Frames.from_fields(config.to_dict()).min_samples(length) + length % 3
            yield name, torch.randn(1, samples, generator=generator)
        elif name == "pixel_values":
            yield name, torch.randn(1, *(int(size) for size in sizes), generator=generator)


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def _padding(config: Any) -> int:
    return int(config.get_text_config().pad_token_id or 0)


def _case(graph: Graph, model: Any, rows: Sequence[Inputs], left: bool) -> Case:
    expected = [graph.plain(row).float() for row in rows]
    inputs = {
        name: _join([row[name][0] for row in rows], _padding(model.config) if name == "input_ids" else 0, left)
        for name in rows[0]
    }
    if "attention_mask" in graph.axes:
        places = [next(iter(row.values()))[0] for row in rows]
        inputs["attention_mask"] = _join([torch.ones_like(row, dtype=torch.long) for row in places], 0, left)
    whole = _join(expected, math.nan, left) if graph.by_place else torch.stack(expected)
    return Case({name: inputs[name] for name in graph.axes}, whole)


def _join(rows: Sequence[torch.Tensor], fill: float, left: bool) -> torch.Tensor:
    """Rows of different lengths as one tensor, padded by ``fill`` after each, or before it."""
    longest = max(len(row) for row in rows)
    rest = [(0, 0) * (row.ndim - 1) for row in rows]
    sides = [(longest - len(row), 0) if left else (0, longest - len(row)) for row in rows]
    return torch.stack(
        [F.pad(row, (*more, *side), value=fill) for row, more, side in zip(rows, rest, sides, strict=True)]
    )


def pack(cases: dict[str, list[Case]], texts: Texts) -> dict[str, torch.Tensor]:
    """All of a check in one mapping; :func:`mgpu_pipe.inference.check_onnx.main` takes it apart.

    Args:
        cases: by file.
        texts: held-out texts, whose perplexity is measured.
    """
    packed = {}
    for file, listed in cases.items():
        for number, case in enumerate(listed):
            values = {**case.inputs, "expected": case.expected}
            packed.update({f"{file}/{number}/{name}": value.contiguous() for name, value in values.items()})
    for number, (ids, labels) in enumerate(texts):
        packed.update({f"texts/{number}/ids": ids.contiguous(), f"texts/{number}/labels": labels.contiguous()})
    return packed
