"""Attention under tensor parallelism: which heads a rank has, and modules that work on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mgpu_pipe.families.family import Style
from mgpu_pipe.models.adapters.dora import MAGNITUDE
from mgpu_pipe.models.adapters.low_rank import B
from mgpu_pipe.parallel.tensor_cut import TensorCut, head_dim, output_dim, outputs

HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "split_size")
"""What attention modules call the number of their query heads, or a width that goes with it."""
GROUPS = "num_key_value_groups"
"""Query heads a key-value head."""
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads")


def cut_key_values(cut: TensorCut, name: str, attention: nn.Module, layer: nn.Module) -> tuple[int, int]:
    """Cut by key-value heads; with fewer of them than ranks, neighbours hold the same one.

    Returns:
        The heads there are, and those of this rank.
    """
    width = head_dim(attention)
    heads = outputs(layer) // width
    if heads % cut.size == 0:
        cut.cut_linear(layer, output_dim(layer), cut.even(name, outputs(layer)))
        return heads, heads // cut.size
    if cut.size % heads:
        fits = [n for n in range(1, cut.size + 1) if n % heads == 0 or heads % n == 0]
        raise cut.refusal(
            f"use one of {fits}", f"{heads} key-value heads ({name}) neither divide nor are divided by it"
        )
    sharing = cut.size // heads
    head = cut.rank // sharing
    cut.cut_linear(layer, output_dim(layer), [(head * width, (head + 1) * width)], owned=cut.rank % sharing == 0)
    sharers = cut.sharers(sharing)
    for attribute in ("weight", "bias", B, MAGNITUDE):
        parameter = layer._parameters.get(attribute)
        if parameter is not None:
            cut.sum_gradient(parameter, sharers)
    return heads, 1


def cut_fused(cut: TensorCut, name: str, attention: nn.Module, layer: nn.Module, style: Style) -> None:
    """Cut queries, keys and values that are one matrix, by key-value heads; the module then counts its own."""
    width = head_dim(attention)
    count = next((count for count in KEY_VALUE_COUNTS if count in attention.__dict__), "num_heads")
    heads = int(getattr(attention, count))
    own = cut.even(name, heads)
    if style == "grouped":
        each = outputs(layer) // heads
        ranges = [(start * each, stop * each) for start, stop in own]
    else:
        queries = outputs(layer) - 2 * heads * width
        parts = [(0, queries), (queries, heads * width), (queries + heads * width, heads * width)]
        ranges = [(at + start, at + stop) for at, length in parts for start, stop in cut.even(name, length)]
        # It reads the number of its query heads there.
        attention.config = _LocalHeads(attention.config, queries // width // cut.size)  # type: ignore[assignment]
    cut.cut_linear(layer, output_dim(layer), ranges)
    if count != "num_heads":
        setattr(attention, count, heads // cut.size)


class _LocalHeads:
    """A configuration of which one module reads another number of heads."""

    def __init__(self, config: Any, num_attention_heads: int) -> None:
        self._config, self.num_attention_heads = config, num_attention_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def cut_inside(cut: TensorCut, name: str, module: nn.Module, width: int) -> None:
    """Cut what works on this rank's heads where it has weights for each head; else it stays whole on every rank.

    Args:
        width: of a head.

    Raises:
        ConfigError: weights over all heads together, of which a rank has a part.
    """
    for attribute, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() == 2 and parameter.shape[-1] == width:
            heads = parameter.shape[0]
            if heads % cut.size and cut.size % heads == 0:
                _cut_shared_norm(cut, module, attribute, heads)
            else:
                cut.parameters.cut(module, attribute, 0, cut.even(name, heads))
        elif parameter.numel() in (1, width):
            cut.sum_gradient(parameter)
        else:
            raise cut.refusal("use strategy.tp=1", f"{name} looks at all heads together, of which a rank has a part")


def _cut_shared_norm(cut: TensorCut, module: nn.Module, attribute: str, heads: int) -> None:
    """Cut a norm's weights by key-value heads, of which there are fewer than ranks."""
    sharing = cut.size // heads
    head = cut.rank // sharing
    cut.parameters.cut(module, attribute, 0, [(head, head + 1)], owned=cut.rank % sharing == 0)
    cut.sum_gradient(getattr(module, attribute), cut.sharers(sharing))


def own_heads_of(cut: TensorCut, argument: str, heads: int) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A hook that leaves this rank's heads of an argument of shape ``(rows * heads, ...)``."""
    own = slice(cut.rank * heads // cut.size, (cut.rank + 1) * heads // cut.size)

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        all_heads = kwargs[argument]
        return args, {**kwargs, argument: all_heads.unflatten(0, (-1, heads))[:, own].flatten(0, 1)}

    return hook


def count_local_heads(cut: TensorCut, name: str, module: nn.Module, key_value_heads: tuple[int, int] | None) -> None:
    """Let an attention module know how many heads are left to it.

    Args:
        key_value_heads: of the whole module, and of this rank; None where they are not cut by themselves.
    """
    counts = {count: value for count in HEAD_COUNTS if isinstance(value := module.__dict__.get(count), int)}
    groups = module.__dict__.get(GROUPS)
    if key_value_heads is not None and isinstance(groups, int):
        counts["query_heads"] = groups * key_value_heads[0]
    for count, heads in counts.items():
        if heads % cut.size:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise cut.refusal(f"use one of {fits}", f"it does not divide the {heads} of {name}'s {count}")
        if count != "query_heads":
            setattr(module, count, heads // cut.size)
    if key_value_heads is not None:
        if "query_heads" in counts:
            setattr(module, GROUPS, counts["query_heads"] // cut.size // key_value_heads[1])
        for count in KEY_VALUE_COUNTS:
            if isinstance(module.__dict__.get(count), int):
                setattr(module, count, key_value_heads[1])
