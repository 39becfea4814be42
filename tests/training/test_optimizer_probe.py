"""What the probe finds out of torch's optimizers, and of users'; the launcher's table of the former is held to it."""

from __future__ import annotations

import pytest
import torch

from mgpu_pipe.checks.optimizer import ELEMENTWISE, STATE_AT_START
from mgpu_pipe.optim.probe import probe

OWN = "tests.support.own_optimizers."
TORCHS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


@pytest.mark.parametrize("name", TORCHS)
def test_every_optimizer_of_torch_is_what_the_table_says(name: str) -> None:
    found = probe(f"torch.optim.{name}", 1e-2, 0.0, {})
    assert (found.scope == "element") == (name in ELEMENTWISE)
    assert found.state_at_start == (name in STATE_AT_START)
    if name not in ELEMENTWISE and name != "Adafactor":
        assert found.refusal is not None


@pytest.mark.parametrize(
    ("name", "scope", "in_place", "at_start"),
    [
        ("Counting", "element", False, False),
        ("Lion", "element", True, False),
        ("Early", "element", True, True),
        ("ByNorm", "tensor", True, False),
        ("Clipping", "model", True, False),
    ],
)
def test_how_far_a_users_optimizer_looks_is_found_out(name: str, scope: str, in_place: bool, at_start: bool) -> None:
    found = probe(OWN + name, 1e-2, 0.01, {})
    assert (found.refusal, found.scope, found.in_place, found.state_at_start) == (None, scope, in_place, at_start)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Noisy", "draws random numbers"),
        ("Remembering", "keeps state outside of its parameters' state"),
        ("Listing", "its state 'last' is a list"),
    ],
)
def test_what_could_not_go_on_from_a_checkpoint_is_refused(name: str, said: str) -> None:
    assert said in str(probe(OWN + name, 1e-2, 0.0, {}).refusal)


@pytest.mark.parametrize(
    ("target", "options", "option", "said"),
    [
        ("AdamW", {"betas": [0.9, 2], "eps": 1e-8}, "betas", "Invalid beta parameter at index 1: 2"),
        ("AdamW", {"amsgrad": True, "capturable": True}, "capturable", "If capturable=True"),
        ("SGD", {"nesterov": True}, "nesterov", "Nesterov momentum requires a momentum"),
        ("Rprop", {"etas": [2, 0.5]}, "etas", "Invalid eta values"),
    ],
)
def test_the_option_at_fault_is_named(target: str, options: dict[str, object], option: str, said: str) -> None:
    found = probe(f"torch.optim.{target}", 1e-2, 0.0, options)
    assert (found.option, said in str(found.refusal)) == (option, True), found
