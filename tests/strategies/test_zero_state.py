"""Oracle: torch's optimizer, which wants its state in the type of its fp32 masters."""

from __future__ import annotations

from typing import Any

import torch

from mgpu_pipe.training.deepspeed.zero_state import Fragment, ZeroState


class OneGroup(ZeroState):
    """A rank's flat tensor of six elements: a whole matrix and the first half of a vector."""

    def __init__(self) -> None:
        self.flat = torch.nn.Parameter(torch.ones(6))

        class Zero:
            optimizer = torch.optim.AdamW([self.flat], fused=True)

        super().__init__(Zero(), [Fragment("a", (2, 2), 0, 4, 0, 0), Fragment("b", (4,), 0, 2, 0, 4)])

    def masters(self) -> list[torch.Tensor]:
        return [self.flat]

    def gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        raise AssertionError("not a part of this test")

    def weights_written(self) -> None:
        raise AssertionError("not a part of this test")


def test_state_of_a_bf16_run_goes_on_in_fp32() -> None:
    state = OneGroup()
    stored: dict[str, Any] = {"a/step": ((), torch.float32), "b/step": ((), torch.float32)}
    for name, shape in (("a", (2, 2)), ("b", (4,))):
        stored |= {f"{name}/{key}": (shape, torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
    state.create_optimizer_state(stored, {"a": torch.bfloat16, "b": torch.bfloat16})
    held = state.optimizer.state[state.flat]
    assert {key: value.dtype for key, value in held.items()} == dict.fromkeys(held, torch.float32)
    state.flat.grad = torch.ones(6)
    state.optimizer.step()  # refuses state of another type
