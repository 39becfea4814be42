"""A tower whole on every tensor-parallel rank, its pictures or recordings dealt over the ranks (``strategy.parts``).

Every rank of a tensor-parallel group has the same micro-batch. Each encodes a share of its pictures, of about equal
cost, and gathers the features of the others (as vLLM with ``mm_encoder_tp_mode=data``). All ranks then compute the same
gradient of all features, so the backward pass sends nothing: each rank takes the rows that it encoded. The gradients of
the tower's parameters are parts of a sum, which
:func:`~mgpu_pipe.parallel.tensor.collectives.reduce_replicated_gradients` takes once a step.

A rank without a picture encodes the cheapest one and drops its features. So all ranks run the same modules in every
pass, as FSDP2 needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.architectures.pictures import deal_by_cost, encoding_costs
from mgpu_pipe.parallel.random_streams import RankStreams

GRIDS = "grid_thw"
"""Argument of a tower of pictures in native size: patches in time, down and across, (pictures, 3)."""
MASKS = ("patch_attention_mask", "attention_mask")
"""Arguments of a tower of fixed-size pictures or spectrograms with a row for each."""
LAYERS = "hidden_states"
"""Output with the hidden states of all layers."""


def keep_towers_whole(
    model: nn.Module, towers: Mapping[str, str], group: dist.ProcessGroup, streams: RankStreams | None
) -> None:
    """Deal the pictures of ``towers`` over the ranks of ``group``, in place; their parameters stay as they are.

    Args:
        towers: name of the module by part of the model.
        streams: where dropout is to draw from; None where nothing is random.
    """
    config: Any = model.config
    chosen = getattr(config, "vision_feature_layer", None)
    layers = [chosen] if isinstance(chosen, int) else list(chosen or ())
    outputs = family_of(str(config.model_type)).tower_outputs
    for part, name in towers.items():
        tower = model.get_submodule(name)
        if streams is not None:
            tower.forward = streams.within(True, tower.forward)
        read = outputs[part]
        if read == ("last_hidden_state",) and layers not in ([], [-1]):  # InternVL
            read = (LAYERS,)
        tower.forward = _DealtTower(tower, group, read, layers).forward


class _DealtTower:
    """Forward pass of a tower over this rank's pictures; exchanges ``outputs``, and ``layers`` of the hidden states."""

    def __init__(
        self, tower: nn.Module, group: dist.ProcessGroup, outputs: Sequence[str], layers: Sequence[int]
    ) -> None:
        self._run, self._config = tower.forward, cast(Any, tower.config)
        self._feed_forward_matrices = 2 + any(name.endswith("gate_proj") for name, _ in tower.named_modules())
        self._group, self._outputs, self._layers = group, outputs, layers

    def forward(self, pixel_values: torch.Tensor, **inputs: Any) -> Any:
        patches, rows, costs = self._sizes(pixel_values, inputs.get(GRIDS))
        shares = deal_by_cost(costs, self._group.size())
        share = shares[self._group.rank()]
        encoded = share or [costs.index(min(costs))]
        pictures = pixel_values.split(patches)
        for name in (GRIDS, *MASKS):
            if inputs.get(name) is not None:
                inputs[name] = torch.stack([inputs[name][picture] for picture in encoded])
        output = self._run(torch.cat([pictures[picture] for picture in encoded]), **inputs)
        features = self._features(output)
        local = torch.cat(features, -1)
        counts = [sum(rows[picture] for picture in each) for each in shares]
        gathered = _GatherShares.apply(local if share else local[:0], counts, self._group)
        dealt = [picture for each in shares for picture in each]
        blocks = dict(zip(dealt, gathered.split([rows[picture] for picture in dealt]), strict=True))
        whole = torch.cat([blocks[picture] for picture in range(len(rows))])
        return self._output(type(output), whole.split([feature.shape[-1] for feature in features], -1))

    def _sizes(
        self, pixel_values: torch.Tensor, grids: torch.Tensor | None
    ) -> tuple[list[int], list[int], list[float]]:
        """For each picture its rows of ``pixel_values``, its rows of features, and its cost."""
        if grids is None:
            ones = [1] * len(pixel_values)
            return ones, ones, [1.0] * len(ones)
        sizes: list[list[int]] = grids.tolist()  # a host sync; the tower itself reads the sizes on the host too
        patches = [times * down * across for times, down, across in sizes]
        merge = int(self._config.spatial_merge_size)
        costs = encoding_costs(sizes, lambda name: getattr(self._config, name, None), self._feed_forward_matrices)
        return patches, [count // merge**2 for count in patches], costs

    def _features(self, output: Any) -> list[torch.Tensor]:
        """Tensors to exchange, with the same number of rows."""
        features: list[torch.Tensor] = []
        for name in self._outputs:
            value = output[name]
            if name == LAYERS:
                features += [value[layer] for layer in self._layers]
            else:
                features += [value] if isinstance(value, torch.Tensor) else value
        return features

    def _output(self, kind: type[Any], features: Sequence[torch.Tensor]) -> Any:
        """Output of the tower with :meth:`_features` of all pictures."""
        if self._outputs[0] == LAYERS:
            return kind(**{LAYERS: dict(zip(self._layers, features, strict=True))})
        first, *others = self._outputs
        return kind(**{first: features[0]}, **{name: list(features[1:]) for name in others})


def gather_shares(rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' ``rows``, one rank after the other; rank ``i`` has ``counts[i]`` of them. Nothing is padded."""
    whole = rows.new_empty(sum(counts), *rows.shape[1:])
    sent = rows.repeat(group.size(), *(1 for _ in rows.shape[1:]))
    dist.all_to_all_single(whole, sent, list(counts), [len(rows)] * group.size(), group=group)
    return whole


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.start, ctx.count = sum(counts[: group.rank()]), len(rows)
        return gather_shares(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.narrow(0, ctx.start, ctx.count), None, None
