"""One step of a small model by the project's own code, and by plain transformers one document at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mgpu_pipe.architectures.find import document_isolation
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.build import build_meta, materialise, model_config
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.compile import compile_blocks
from mgpu_pipe.parallel.tensor.apply import apply_tensor_parallel
from mgpu_pipe.parallel.tensor.collectives import reduce_replicated_gradients
from tests.families.cells import SEQ_LEN
from tests.support.filling import fill, owned_shards

ROWS = ((11, 8, 5), (4, 13, 7))
"""Lengths of the documents that make up a row each."""
SEEN = 1e-4
"""Relative change of a logit from which on it depends on a token."""
NOISE = 0.05
"""Added to every parameter: nothing is zero, and norms are not one."""
Batch = dict[str, torch.Tensor]
Tensors = dict[str, torch.Tensor]


def documents(vocabulary: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each document; the first labels of some carry no loss."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for number, length in enumerate(length for row in ROWS for length in row):
        ids = torch.randint(3, vocabulary - 3, (length,), generator=generator)
        labels = torch.cat([ids[1:], torch.tensor([IGNORE_INDEX])])
        labels[: number % 3] = IGNORE_INDEX
        found.append((ids, labels))
    return found


def packed(docs: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    """Two rows of three documents each."""
    rows = [docs[:3], docs[3:]]
    return {
        "input_ids": torch.stack([torch.cat([ids for ids, _ in row]) for row in rows]),
        "labels": torch.stack([torch.cat([labels for _, labels in row]) for row in rows]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(ids)) for ids, _ in row]) for row in rows]),
    }


def padded(docs: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    """A row for each document, padded as the loader pads."""

    def row(values: torch.Tensor, fill_with: int) -> torch.Tensor:
        return F.pad(values, (0, SEQ_LEN - len(values)), value=fill_with)

    return {
        "input_ids": torch.stack([row(ids, 0) for ids, _ in docs]),
        "labels": torch.stack([row(labels, IGNORE_INDEX) for _, labels in docs]),
        "position_ids": torch.stack(
            [torch.cat([torch.arange(len(ids)), torch.arange(SEQ_LEN - len(ids))]) for ids, _ in docs]
        ),
    }


def cut(batch: Batch, size: int) -> list[Batch]:
    rows = range(0, len(batch["labels"]), size)
    return [{name: value[at : at + size] for name, value in batch.items()} for at in rows]


def whole_model(config: ModelConfig) -> Any:
    """The model on one process, from its initial weights with noise: the same on every rank."""
    model = materialise(build_meta(config), 5, "cpu")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=NOISE)
    return model


def values_of(model: Any) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def one_document_at_a_time(config: ModelConfig, weights: Tensors, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The oracle: transformers' own model, built as it builds one, over each document alone."""
    from transformers import AutoModelForCausalLM

    settings = copy.deepcopy(model_config(config))
    rope = getattr(settings, "rope_parameters", None) or {}
    for table in (rope, *(entry for entry in rope.values() if isinstance(entry, dict))):
        if table.get("rope_type") == "longrope":
            # The table of a sequence of SEQ_LEN tokens, which is beyond the border; the documents are not.
            if "long_mscale" in table:  # Phi-MoE's scale depends on the length, its frequencies do not
                table["short_mscale"] = table["long_mscale"]
            else:
                table["short_factor"] = table["long_factor"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    compute_in(model, dtype)
    docs = documents(settings.get_text_config().vocab_size)
    count = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in docs)
    total = 0.0
    for ids, labels in docs:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum") / count
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total, "gradients": gradients, "sees_the_future": sees_later_tokens(model, docs[0][0])}


@torch.no_grad()
def sees_later_tokens(model: Any, ids: torch.Tensor) -> bool:
    """Whether the logits of the first tokens change with the last token of ``ids``."""
    changed = ids.clone()
    changed[-1] = ids[0] if ids[0] != ids[-1] else ids[0] + 1
    first, other = (model(input_ids=tokens[None], use_cache=False).logits[0, :-1] for tokens in (ids, changed))
    return float((first - other).abs().max() / first.abs().max()) > SEEN


def compute_in(model: Any, dtype: torch.dtype) -> None:
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # grouped products have no float64
    model.to(dtype)


def steps(model: Any, batches: list[Batch]) -> tuple[float, Tensors]:
    """Loss and gradients of one step through the project's objective, from whatever was done to ``model``."""
    objective = CausalLMObjective(model, None, lambda step: 1.0, 7)
    count = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = objective.micro_batch_loss(batch)
        loss.backward(torch.full_like(loss, 1.0 / count))
        total += float(loss.detach()) / count
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ways(config: ModelConfig, with_packs: bool) -> dict[str, list[Batch]]:
    """The same samples cut differently."""
    docs = documents(int(model_config(config).get_text_config().vocab_size))
    found = {"padded, three at once": cut(padded(docs), 3), "padded, one at a time": cut(padded(docs), 1)}
    if with_packs:
        found |= {"packed, both at once": cut(packed(docs), 2), "packed, one at a time": cut(packed(docs), 1)}
    return found


def isolates(config: ModelConfig) -> bool:
    return document_isolation(str(config.type), config.config) != "none"


def single(config: ModelConfig, model: Any, compiled: bool = False) -> dict[str, tuple[float, Tensors]]:
    """Loss and gradients of the whole ``model`` for each way to cut the samples.

    Args:
        compiled: traced by torch.compile, with the operators that stand there: no compiler is started.
    """
    fix_rotary_length(model, SEQ_LEN)
    chosen = ways(config, isolates(config))
    if compiled:
        chosen = {way: batches for way, batches in chosen.items() if way.startswith("padded")}  # two shapes
        with patch("torch.compile", partial(torch.compile, backend="aot_eager")):
            compile_blocks(model)
    found = {}
    for way, batches in chosen.items():
        model.zero_grad(set_to_none=True)
        found[way] = steps(model, batches)
    packs = {way: batches for way, batches in chosen.items() if way.startswith("packed")}
    if packs and use_packed_attention(model):
        for way, batches in packs.items():
            model.zero_grad(set_to_none=True)
            found[f"{way}, by starts"] = steps(model, batches)
    return found


def tensor_parallel(
    config: ModelConfig, weights: Tensors, dtype: torch.dtype = torch.float32
) -> tuple[float, list[Any]]:
    """This rank's loss and its pieces of the gradients."""
    model = build_meta(config)
    fix_rotary_length(model, SEQ_LEN)
    group = dist.group.WORLD
    assert group is not None
    apply_tensor_parallel(model, group)
    fill(model, weights)
    compute_in(model, dtype)
    way = "packed, both at once" if isolates(config) else "padded, three at once"
    loss, _ = steps(model, ways(config, isolates(config))[way])
    reduce_replicated_gradients(model, group)
    return loss, owned_shards(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def error(found: tuple[float, Mapping[str, torch.Tensor]], expected: Mapping[str, Any]) -> tuple[float, str]:
    """The largest error over its bound (mgpu_pipe.verify.certificate), and of what; infinite where a gradient lacks."""
    loss, gradients = found
    want: Tensors = expected["gradients"]
    lacking = sorted(name for name in want.keys() ^ gradients.keys() if bool((want | dict(gradients))[name].any()))
    if lacking:
        return float("inf"), f"{lacking[0]} in one alone"
    total = sum(float(g.double().square().sum()) for g in want.values()) ** 0.5
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    errors = [(abs(loss / expected["loss"] - 1) / 1e-5, "loss"), (abs(norm / total - 1) / 1e-5, "norm")]
    for name, gradient in gradients.items():
        if name in want:
            bound = 1e-5 * float(want[name].double().norm()) + 1e-7 * total
            errors.append((float((gradient - want[name]).double().norm()) / bound, name))
    return max(errors, key=lambda one: one[0] if one[0] == one[0] else float("inf"))
