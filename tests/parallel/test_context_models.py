"""Oracle: the plain model over whole micro-batches in one process; last, that of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.architectures.find import families_with
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.losses.cross_entropy import logits_cross_entropy
from mgpu_pipe.objectives.packed_text import forward_kwargs, packed_text
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.context.attention import apply_context_parallel, context_of
from tests.models.tiny import tiny_model
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tiny import MODELS, VOCABULARY, global_batch

pytestmark = pytest.mark.slow

MICRO_BATCHES, ROWS = 2, 4
CPU = torch.device("cpu")


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    model = materialise(build_meta(config), 5, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # makes attention matter: at initialisation it is nearly uniform
    return model.to(dtype)


def micro_batches(length: int) -> list[dict[str, torch.Tensor]]:
    """Of packed rows, the last row one document; ``length`` at most that of the step batch."""
    batch = {name: value[:, :length].clone() for name, value in global_batch(0, MICRO_BATCHES * ROWS).items()}
    batch["position_ids"][-1] = torch.arange(length)
    return [{name: value[at : at + ROWS] for name, value in batch.items()} for at in range(0, 8, ROWS)]


def plain(name: str, length: int, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, torch.Tensor]]:
    model = model_of(MODELS[name], dtype)
    return totals(model, micro_batches(length))


def totals(model: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    count = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        with context_of(model, batch) as part:
            logits = model(**forward_kwargs(model, part)).logits
            loss = logits_cross_entropy(logits, part["labels"]) / count
        # Outside: the backward pass knows its micro-batch.
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def summed(loss: float, gradients: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, summed over the ranks."""
    total = torch.tensor(loss, dtype=torch.float64)
    for value in (total, *gradients.values()):
        dist.all_reduce(value)
    return float(total), gradients


def split(
    name: str, method: str, length: int, dtype: torch.dtype = torch.float32, checkpointing: str = "none"
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients, summed over the ranks."""
    model = model_of(MODELS[name], dtype)
    apply_context_parallel(model, dist.group.WORLD, method, packed_text())
    apply_activation_checkpointing(model, checkpointing)
    return summed(*totals(model, micro_batches(length)))


def split_each(names: list[str], methods: list[str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    return {f"{name} {method}": split(name, method, 24) for name in names for method in methods}


def worst_over_bound(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """A gradient's error over its bound (mgpu_pipe.verify.certificate); 1 is the bound."""
    assert gradients.keys() == expected.keys()
    total = float(torch.cat([g.double().flatten() for g in expected.values()]).norm())
    errors = {
        name: float((gradients[name] - gradient).double().norm())
        / (1e-5 * float(gradient.double().norm()) + 1e-7 * total)
        for name, gradient in expected.items()
    }
    return max(errors.values())


def check(results: list[Any], expected: Any, what: str = "") -> None:
    for loss, gradients in results:
        assert abs(loss / expected[0] - 1) < 1e-5, what
        worst = worst_over_bound(gradients, expected[1])
        print(f"{what} loss {abs(loss / expected[0] - 1):.1e}, gradients over their bound {worst:.3f}")
        assert worst <= 1, what


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_loss_and_every_gradient_are_those_of_one_process(size: int) -> None:
    names, methods = ["llama", "qwen3", "gpt2", "mixtral"], ["ring", "ulysses"]
    results = run_processes(size, split_each, names, methods)
    for name in names:
        expected = plain(name, 24)
        for method in methods:
            check([result[f"{name} {method}"] for result in results], expected, f"{name} {method} cp={size}")


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_length_that_does_not_divide_is_padded(method: str) -> None:
    check(run_processes(4, split, "llama", method, 21), plain("llama", 21))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_checkpointed_block_is_computed_again_for_its_own_micro_batch(method: str, mode: str) -> None:
    check(run_processes(2, split, "llama", method, 24, torch.float32, mode), plain("llama", 24))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bf16_is_as_close_to_fp32_as_one_bf16_process(method: str) -> None:
    exact, alone = plain("llama", 24), plain("llama", 24, torch.bfloat16)

    def error(found: dict[str, torch.Tensor]) -> float:
        pairs = [(found[name].double(), gradient.double()) for name, gradient in exact[1].items()]
        return float(torch.cat([(a - b).flatten() for a, b in pairs]).norm())

    for loss, gradients in run_processes(4, split, "llama", method, 24, torch.bfloat16):
        print(f"gradients {error(gradients) / error(alone[1]):.2f} of one bf16 process")
        assert error(gradients) <= 1.5 * error(alone[1])
        assert abs(loss / exact[0] - 1) <= max(1.5 * abs(alone[0] / exact[0] - 1), 1e-3)


def heads_of_half_a_model(method: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Tensor parallelism's attention: half of the heads in every projection, the configuration unchanged."""
    model = model_of(MODELS["llama"])
    halve(model)
    apply_context_parallel(model, dist.group.WORLD, method, packed_text())
    return summed(*totals(model, micro_batches(24)))


def halve(model: Any) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight = torch.nn.Parameter(projection.weight.detach().chunk(2)[0].clone())
        attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight.detach().chunk(2, dim=1)[0].clone())


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_heads_are_those_of_the_tensors(method: str) -> None:
    model = model_of(MODELS["llama"])
    halve(model)
    check(run_processes(2, heads_of_half_a_model, method), totals(model, micro_batches(24)))


def outside() -> tuple[bool, str]:
    """Whether whole sequences outside of a context give the plain model's logits, and what a wrong part gives."""
    batch = micro_batches(24)[0]
    model = model_of(MODELS["llama"])
    with torch.no_grad():
        expected = model(**forward_kwargs(model, batch)).logits
        apply_context_parallel(model, dist.group.WORLD, "ring", packed_text())
        same = torch.equal(model(**forward_kwargs(model, batch)).logits, expected)
        with context_of(model, batch):
            try:
                model(**forward_kwargs(model, batch))
            except RuntimeError as error:
                return same, str(error)
    return same, ""


def test_outside_of_a_context_the_model_is_the_plain_one() -> None:
    for same, message in run_processes(2, outside):
        assert same
        assert "hand the model what context_of gives" in message


def refused(config: ModelConfig) -> str:
    model = model_of(config)
    apply_context_parallel(model, dist.group.WORLD, "ring", packed_text())
    try:
        totals(model, [{name: value[:, :24] % VOCABULARY for name, value in micro_batches(24)[0].items()}])
    except ConfigError as error:
        return str(error)
    return ""


def test_attention_that_is_not_computed_is_refused() -> None:
    step_batch = ModelConfig(name="m", type="mistral", config={**MODELS["llama"].config, "sliding_window": 8})
    assert "sliding_window=8" in run_processes(2, refused, step_batch)[0]
    capped = ModelConfig(name="g", type="gemma2", config={**MODELS["llama"].config, "head_dim": 8})
    assert "softcap" in run_processes(2, refused, capped)[0]
    dropping = ModelConfig(name="l", type="llama", config={**MODELS["llama"].config, "attention_dropout": 0.1})
    assert "dropout" in run_processes(2, refused, dropping)[0]


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


@pytest.mark.parametrize("first", one_in(3, range(3)))
def test_every_family_that_is_offered(first: int) -> None:
    """A third at a time."""
    for errors in run_processes(2, both, families_with(lambda family: family.context)[first::3]):
        print(sorted(errors.items(), key=lambda entry: -entry[1])[:12])
        assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
