"""Sequence parallelism: modules between the tensor-parallel regions work on a part of the sequence.

The embeddings keep the whole length, because transformers reads masks and positions off their shape. The sequence is
split before the first block and whole again after the last norm, or after the last block without a norm
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.parallel.random_streams import RankStreams
from mgpu_pipe.parallel.tensor.collectives import SEQUENCE_DIM, gather_sequence, split_sequence, sum_forward


class SequenceSplit:
    """Whether, in the current forward pass, activations between the regions are split.

    A sequence that the group's size does not divide, as generation has, is left whole.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.active = False
        self._embedding_is_partial = False

    def begin(self, length: int) -> None:
        """Decide for ``length`` positions; ValueError in training, where gradients of norms have to be partial."""
        self.active = length % self.group.size() == 0
        if not self.active and torch.is_grad_enabled():
            raise ValueError(
                f"sequence parallelism over {self.group.size()} processes cannot split a sequence of {length}: "
                f"use a multiple of {self.group.size()} for data.seq_len"
            )

    def embed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' ``partial`` embeddings, left to the first block where the sequence is split there."""
        self.begin(partial.shape[SEQUENCE_DIM])
        self._embedding_is_partial = self.active
        return partial if self.active else sum_forward(partial, self.group)

    def add_once(self, addend: torch.Tensor) -> torch.Tensor:
        """``addend`` to the embeddings, which every rank holds: one rank's counts where the sum comes later."""
        return addend if not self._embedding_is_partial or self.group.rank() == 0 else addend * 0.0

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Into the blocks: ``(..., sequence, width)`` to this rank's part."""
        if not self._embedding_is_partial:  # a pipeline's later stage: the whole sequence, the same on every rank
            self.begin(hidden.shape[SEQUENCE_DIM])
        partial, self._embedding_is_partial = self._embedding_is_partial, False
        return split_sequence(hidden, self.group, partial) if self.active else hidden


def split_between(
    sequence: SequenceSplit,
    first_block: nn.Module,
    last: nn.Module,
    addends: list[nn.Module],
    partial_gradient: bool,
    streams: RankStreams | None = None,
) -> None:
    """Hook the split in front of ``first_block`` and the gathering after ``last``.

    Args:
        addends: modules whose result is added to the embeddings in between, as learnt positions are.
        partial_gradient: a vocabulary-parallel head follows ``last``.
        streams: where dropout is to draw from.
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed = with_hidden(args, kwargs, sequence.enter(hidden_of(args, kwargs)))
        if streams is not None:
            streams.use(sequence.active)
        return changed

    def leave(_: nn.Module, __: object, output: Any) -> Any:
        if not sequence.active:
            return output
        if streams is not None:
            streams.use(False)
        hidden = output[0] if isinstance(output, tuple) else output
        gathered = gather_sequence(hidden, sequence.group, partial_gradient)
        return (gathered, *output[1:]) if isinstance(output, tuple) else gathered

    def add_once(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        return sequence.add_once(output)

    first_block.register_forward_pre_hook(enter, with_kwargs=True)
    last.register_forward_hook(leave)
    for addend in addends:
        addend.register_forward_hook(add_once)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a module's arguments: the first one, or the one of that name."""
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, torch.Tensor)
    return hidden


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with its hidden states replaced by ``hidden``."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
