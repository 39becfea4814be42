"""Oracle: each family's plain model over the same packed rows in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.architectures.find import families_with
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.losses.cross_entropy import logits_cross_entropy
from mgpu_pipe.objectives.packed_text import forward_kwargs, packed_text
from mgpu_pipe.parallel.context.attention import apply_context_parallel, context_of
from tests.models.tiny import tiny_model
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tiny import global_batch

pytestmark = pytest.mark.slow

WITHOUT_CAP = {"gemma2": {"attn_logit_softcapping": None}}


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the tokens' losses, and all its gradients."""
    with context_of(model, batch) as part:
        logits = model(**forward_kwargs(model, part)).logits
        total = logits_cross_entropy(logits, part["labels"])
    total.backward()
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return total.detach(), torch.cat([gradient.flatten().double() for gradient in found])


def both(families: list[str]) -> dict[str, float]:
    """The relative error of each family under each method; its gradients are summed over the ranks."""
    errors = {}
    batch = global_batch(0, 4)
    for family in families:
        config = tiny_model(family, **WITHOUT_CAP.get(family, {}))
        model = materialise(build_meta(config), 1, "cpu").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        expected = gradients(model, batch)
        for method in ("ring", "ulysses"):
            model.zero_grad()
            apply_context_parallel(model, dist.group.WORLD, method, packed_text())
            for found, true in zip(gradients(model, batch), expected, strict=True):
                dist.all_reduce(found)
                error = float((found - true).norm() / true.norm())
                errors[f"{family} {method}"] = max(error, errors.get(f"{family} {method}", 0.0))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("first", one_in(3, range(3)))
def test_every_family_that_is_offered(first: int) -> None:
    """A third at a time."""
    for errors in run_processes(2, both, families_with(lambda family: family.context)[first::3]):
        print(sorted(errors.items(), key=lambda entry: -entry[1])[:12])
        assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
