"""Oracle: torch.amp.GradScaler's documented rule."""

import pytest
import torch

from mgpu_pipe.optim.gradients import SMALLEST, LossScale


def test_the_rule_is_gradscalers() -> None:
    mine = LossScale(interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for finite in (True, False, True, True, True, True, False, False, True, True, True):
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.tensor([1.0 if finite else float("inf")])
        theirs.step(optimizer)
        theirs.update()
        mine.update(finite)
        assert mine.value == theirs.get_scale()


def test_a_state_goes_on() -> None:
    scale = LossScale(interval=3)
    scale.update(True)
    scale.update(True)
    other = LossScale(interval=3)
    other.restore(scale.state())
    other.update(True)
    assert (other.value, other.updates) == (2.0**17, 0)


def test_it_ends_where_no_scale_helps() -> None:
    scale = LossScale(value=SMALLEST)
    with pytest.raises(OverflowError):
        scale.update(False)
