"""The plain loop that runs of a strategy are compared with, and the comparison."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice, tiling_fault
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.shard_units import decoder_blocks
from tests.support import training
from tests.support.training import LEARNED, LR, MUON, Batch, Case, Outcome, batch_of, filled


class PairOfOptimizers(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of the hidden layers, one at a time of a stack, and torch.optim.AdamW for the
    rest. In fp32 Muon's iteration, which torch has in bf16 only, is computed in float64."""

    def __init__(self, case: Case, model: Any) -> None:
        options = dict(case.optimizer_options)
        rest = {"lr": options.pop("adamw_lr"), "betas": (0.9, 0.95), "weight_decay": options["weight_decay"]}
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        apart = embeddings | {id(model.get_output_embeddings().weight)}
        matrices = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in apart]
        chosen = {id(p) for p in matrices}
        self.views = [(p, i) for p in matrices for i in (range(len(p)) if p.dim() == 3 else [None])]
        flat = [p if i is None else p.detach()[i] for p, i in self.views]
        others = [p for p in model.parameters() if id(p) not in chosen]
        groups: Any = [
            {"params": [p for p in others if p.dim() >= 2]},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, **rest)
        self.muon = torch.optim.Muon(flat, **{**options, "lr": options.get("lr", LR)})
        self.flat, self.exact = flat, case.precision == "fp32"
        super().__init__(list(model.parameters()), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for view, (parameter, index) in zip(self.flat, self.views, strict=True):
            assert parameter.grad is not None
            view.grad = parameter.grad if index is None else parameter.grad[index]
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double) if self.exact else nullcontext():
            self.muon.step()
        self.adamw.step()


def stock_optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The class itself, of all parameters in one group; torch.optim.Muon beside AdamW for this program's Muon."""
    if case.by_hand is not None:
        return case.by_hand(model)
    if case.optimizer == MUON:
        return PairOfOptimizers(case, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = {"fused": True} if case.optimizer == "torch.optim.AdamW" else {}
    module, _, name = case.optimizer.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    made: torch.optim.Optimizer = cls(trained, **{"lr": LR, **fused, **case.optimizer_options})
    return made


def plain(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The oracle: stock forward passes with whole logits and stock AdamW, in one process.

    Whole batches, or one sample at a time where the model looks at the sample; ``dtype`` is what parameters are cast
    to for compute.
    """
    model = filled(training.built(case), seed=case.seed)
    optimizer = stock_optimizer(case, model)
    losses, norms, gradients = [], [], {}
    for step in range(case.steps):
        batch = batch_of(case, step)
        count = int((batch["labels"] != IGNORE_INDEX).sum())
        size = 1 if case.branches else case.samples
        total = 0.0
        optimizer.zero_grad()
        for at in range(0, case.samples, size):
            part = {name: value[at : at + size] for name, value in batch.items()}
            if case.branches:
                decoder_blocks(model)[0].sample = 0 if case.together else int(part["input_ids"].sum())  # type: ignore[assignment]
            cast = {n: p.to(dtype) if p.is_floating_point() else p for n, p in model.named_parameters()}
            learned = LEARNED.get(case.model)
            forward = functools.partial(_called, model, cast)
            loss = (learned.loss if learned else _next_token_loss)(forward, part) / count
            loss.backward()
            total += loss.item()
        present = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.double().square().sum() for g in present]).sum().sqrt())
        if case.max_norm is not None and norm > case.max_norm:
            for gradient in present:
                gradient.mul_(case.max_norm / (norm + 1e-6))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(total)
        norms.append(norm)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def _called(model: Any, weights: dict[str, torch.Tensor], **inputs: Any) -> Any:
    return torch.func.functional_call(model, weights, kwargs=inputs)


def _next_token_loss(forward: Callable[..., Any], part: Batch) -> torch.Tensor:
    inputs = {"input_ids": part["input_ids"], "position_ids": part["position_ids"], "use_cache": False}
    logits, labels = forward(**inputs).logits.float(), part["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def assembled(by_rank: list[list[LocalShard]]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' local shards; fails where they do not tile them, or copies of a block differ."""
    held: dict[str, dict[TensorSlice, torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shards in by_rank:
        for shard in shards:
            known = held.setdefault(shard.tensor_slice.name, {})
            assert shard.tensor_slice not in known or torch.equal(known[shard.tensor_slice], shard.tensor), (
                shard.tensor_slice.key
            )
            known[shard.tensor_slice] = shard.tensor
            shapes[shard.tensor_slice.name] = shard.global_shape
    found = {}
    for name, tensor_slices in held.items():
        fault = tiling_fault(shapes[name], list(tensor_slices))
        assert fault is None, f"{name}: {fault}"
        whole = torch.empty(shapes[name], dtype=next(iter(tensor_slices.values())).dtype)
        for tensor_slice, tensor in tensor_slices.items():
            whole[tuple(slice(o, o + n) for o, n in zip(tensor_slice.offsets, tensor_slice.shape, strict=True))] = (
                tensor
            )
        found[name] = whole
    return found


def norm_of(tensors: Any) -> float:
    return sum(float(t.double().square().sum()) for t in tensors) ** 0.5


def worst_error(results: list[Outcome], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest error over its bound, and of what; above 1 is a failure."""
    found: list[tuple[float, str]] = []
    for rank, result in enumerate(results):
        assert len(result.losses) == len(expected["losses"])
        for step, values in enumerate(zip(result.losses, expected["losses"], strict=True)):
            found.append((abs(values[0] / values[1] - 1) / 1e-5, f"loss of step {step + 1}, rank {rank}"))
        for step, values in enumerate(zip(result.norms, expected["norms"], strict=True)):
            found.append((abs(values[0] / values[1] - 1) / 1e-5, f"norm of step {step + 1}, rank {rank}"))
    gradients, weights = assembled([r.gradients for r in results]), assembled([r.weights for r in results])
    assert gradients.keys() == expected["gradients"].keys()
    assert weights.keys() == expected["weights"].keys()
    for name in [name for name, weight in weights.items() if not weight.is_floating_point()]:
        assert torch.equal(weights.pop(name), expected["weights"][name]), f"the bytes of {name}"
    total = norm_of(expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        bound = 1e-5 * norm_of([gradient]) + 1e-7 * total
        found.append((norm_of([gradients[name] - gradient]) / bound, f"gradient of {name}"))
    truth = {name: expected["weights"][name] for name in weights}
    difference = norm_of(weights[name] - value for name, value in truth.items())
    found.append((difference / norm_of(truth.values()) / 1e-5, "weights"))
    return max(found)
