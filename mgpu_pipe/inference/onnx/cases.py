"""Batches of several sizes and lengths that check a file, with what the run computes of each row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.inference.accuracy import Texts
from mgpu_pipe.inference.onnx.graphs import Graph
from mgpu_pipe.inference.streamed_weights import PROBE_TOKENS, Inputs
from mgpu_pipe.models.field_sizes import usable_positions
from mgpu_pipe.objectives.contrastive import caption_end_token


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
        name: _joined([row[name][0] for row in rows], _padding(model.config) if name == "input_ids" else 0, left)
        for name in rows[0]
    }
    if "attention_mask" in graph.axes:
        places = [next(iter(row.values()))[0] for row in rows]
        inputs["attention_mask"] = _joined([torch.ones_like(row, dtype=torch.long) for row in places], 0, left)
    whole = _joined(expected, math.nan, left) if graph.by_place else torch.stack(expected)
    return Case({name: inputs[name] for name in graph.axes}, whole)


def _joined(rows: Sequence[torch.Tensor], fill: float, left: bool) -> torch.Tensor:
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
